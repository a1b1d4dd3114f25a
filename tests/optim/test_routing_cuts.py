"""Weights of several maps that only the code of their module tells: warned of, and no others.

`FUSED` holds ways to take apart what `self.project` gives, `WHOLE` ways to use it that only look
like one. None of the names and sizes here tells anything.
"""

import ast
import gc
import linecache
import re
import types
import warnings
import weakref
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import nucleon
from nucleon.optim.routing import cuts, fused

einops = types.SimpleNamespace(rearrange=None)  # only its name is read


class Module(nn.Module):
    """A Linear, or a convolution, whose output `forward` of a subclass uses."""

    heads, size, width, dim = 2, 4, 8, -1

    def __init__(self, rows=24):
        super().__init__()
        self.project = nn.Linear(8, rows)
        self.norm, self.act = nn.LayerNorm(rows), nn.SiLU()
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)


class Channels(Module):
    def __init__(self, rows=24):
        super().__init__()
        self.project = nn.Conv2d(8, rows, 1)


def split_in_three(y, width):
    return y.split(width, dim=2)


def rotated(x):
    one, other = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-other, one), dim=-1)


def every_other(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def turned(x, cos, sin):
    one, other = torch.chunk(x, 2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


class Chunk(Module):
    def forward(self, x):
        a, b, c = self.project(x).chunk(3, -1)
        return a * b + c


class ChunkOfTwoAxes(Module):
    def forward(self, x):
        shift, scale, gate = self.project(x).chunk(3, dim=1)
        return x * scale + shift, gate


class Split(Module):
    def forward(self, x):
        y = self.act(self.norm(self.project(x))) * 2 + self.bias
        a, b, c = torch.split(y, self.width, dim=2)
        return a * b + c


class Sections(Module):
    def forward(self, x):
        a, b, c = self.project(x).split([2 * self.width, self.size, self.size], dim=self.dim)
        return a, b, c


class SectionsPerHead(Module):
    def forward(self, x):
        y = self.project(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2)
        return y.split([self.width, self.size], dim=-1)


class Unbound(Module):
    def forward(self, x):
        y = self.project(x).reshape(len(x), -1, 3, self.heads, self.size)
        q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
        return q @ k.mT @ v


class UnboundTwice(Module):
    def forward(self, x):
        y = self.project(x).reshape(len(x), -1, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q, k, v = y.reshape(3, len(x) * self.heads, -1, self.size).unbind(0)
        return q @ k.mT @ v


class Entries(Module):
    def forward(self, x):
        y = self.project(x).unflatten(-1, (3, self.heads, -1)).movedim(2, 0)
        return y[0] @ y[1].mT @ y[2]


class Unpacked(Module):
    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, -1)).transpose(0, 2)
        return q @ k.mT @ v


class Einops(Module):
    def forward(self, x):
        y = einops.rearrange(self.project(x), "b n (k h d) -> k b h n d", k=3, h=self.heads)
        q, k, v = y
        return q @ k.mT @ v


class Slices(Module):
    def forward(self, x):
        y = self.project(x)
        return y[..., : self.width] * y[..., self.width :].sum(-1, keepdim=True)


class EveryOther(Module):
    def forward(self, x):
        y = self.project(x)
        return y[..., ::2] * y[..., 1::2]


class Comprehension(Module):
    def forward(self, x):
        shape = (*x.shape[:-1], self.heads, self.size)
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.project(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v)


class Mapped(Module):
    def forward(self, x):
        q, k, v = map(torch.t, self.project(x).chunk(3, dim=-1))
        return q @ k.mT @ v


class Helper(Module):
    def forward(self, x):
        a, b, c = split_in_three(self.project(x), self.width)
        return a * b + c


class Method(Module):
    def forward(self, x, fast=False):
        if fast:
            return self.parts(y=self.project(x))
        return None

    def parts(self, y):
        return y.chunk(3, dim=-1)


class Alias(Module):
    def forward(self, x):
        give = self.project
        for _ in range(2):
            y = give(x) if self.training else None
        with torch.no_grad():
            a, b, c = y.chunk(3, -1)
        return a * b + c


class Checkpointed(Module):
    def forward(self, x):
        a, b, c = torch.utils.checkpoint.checkpoint(self.project, x).chunk(3, -1)
        return a * b + c


class ByWeight(Module):
    def forward(self, x):
        q, k, v = self.project.weight.chunk(3, dim=0)
        return x @ q.T, x @ k.T, x @ v.T


class Functional(Module):
    def forward(self, x):
        a, b, c = F.linear(x, self.project.weight).chunk(3, dim=-1)
        return a * b + c


class SumOfTwo(Module):
    def forward(self, x, h):
        gates = self.project(x) + self.second(h)
        i, f, g = gates.chunk(3, 1)
        return i * g + f


class ProductAndDifference(Module):
    def forward(self, x):
        q, k, v = self.project(x).chunk(3, dim=-1)
        return torch.cat([q[:, None] * k[:, :, None], q[:, None] - k[:, :, None] + v], dim=-1)


class Truncated(Module):
    def forward(self, x):
        a, b, c = self.project(x)[..., : self.width * 3].chunk(3, dim=-1)
        return a * b + c


class KeptApart(Module):
    """Parts that are put into a cache side by side are maps all the same."""

    def forward(self, x, cache):
        k, v, gate = self.project(x).chunk(3, dim=-1)
        cache["k"], cache["v"], cache["gate"] = k, v, gate
        cache[:, 0], cache[:, 1], cache[:, 2] = k, v, gate
        return cache


class InALoop(Module):
    def forward(self, x):
        for part in self.project(x).chunk(3, dim=-1):
            x = torch.cat([turned(part, x, x), x], dim=-1)
        return x


class Gated(Module):
    def forward(self, x):
        return F.glu(self.project(x), dim=-1)


class Derived(Chunk):
    def forward(self, x):
        return 2 * super().forward(x)


class NoForward(Module):
    """As a module of Lightning has it."""

    def training_step(self, x):
        a, b, c = self.project(x).chunk(3, -1)
        return a * b + c


class SiluAndMul(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, x):
        gate, up = x.split([self.width, self.width], -1)
        return F.silu(gate) * up


class GateInAModule(Module):
    def __init__(self):
        super().__init__()
        self.act = SiluAndMul(12)

    def forward(self, x):
        return self.act(self.project(x))


class ScaleByNone(Module):
    def forward(self, x):
        scale, shift = self.project(x)[:, :, None, None].chunk(2, dim=1)
        return scale + shift


class ScaleUnsqueezed(Module):
    def forward(self, x):
        scale, shift = self.project(x).unsqueeze(-1).unsqueeze(-1).chunk(2, 1)
        return scale + shift


class ScaleAsDeep(Module):
    def forward(self, x, image):
        y = self.project(x)
        while y.ndim < image.ndim:
            y = y[..., None]
        scale, shift = torch.chunk(y, 2, dim=1)
        return scale + shift


class ScaleViewed(Module):
    def forward(self, x):
        scale, shift = self.project(x).view(len(x), -1, 1, 1).chunk(2, 1)
        return scale + shift


class ScaleSplit(Module):
    def forward(self, x):
        scale, shift = torch.split(self.project(x), [self.width, 2 * self.width], dim=1)
        return scale + shift.sum()


class ScaleSplitEvenly(Module):
    def forward(self, x):
        scale, shift, gate = self.project(x).split(self.width, dim=1)
        return scale + shift * gate


class ScaleSliced(Module):
    def forward(self, x):
        y = self.project(x)
        return y[:, : self.width] + y[:, self.width : 2 * self.width] * y[:, 2 * self.width :]


class ScaleSlicedForImages(Module):
    def forward(self, x, number):
        y = self.project(x)
        return y[:, :number, None, None] + y[:, number:, None, None].sum()


class ImageChannels(Channels):
    def forward(self, x):
        q, k, v = self.project(x).flatten(2).chunk(3, dim=1)
        return q @ k.mT @ v


class ImageViews(Channels):
    def forward(self, x):
        b, _, h, w = x.shape
        q, k, v = self.project(x).reshape(b, 3, self.heads, self.size, h * w).unbind(1)
        return q @ k.mT @ v


class Rotated(Module):
    """Rotary embeddings of several kinds, and tokens in two parts: none is a map of its own."""

    def forward(self, x, cos, sin, number):
        q = self.project(x).view(*x.shape[:-1], -1, self.size).transpose(1, 2)
        q = q * cos + rotated(q) * sin
        q = turned(q * cos + every_other(q) * sin, cos, sin)
        turns, stays = q.split([number, self.size - number], dim=-1)
        q = torch.cat((turned(turns, cos, sin), stays), dim=-1)
        start = q[..., : self.size // 2] * cos
        return torch.cat((start, q[..., self.size // 2 :]), dim=-1)


class TurnedInParts(Module):
    """A rotary embedding of images: a part of each head for each axis of the image."""

    def forward(self, x, cos, sin):
        parts = torch.split(self.project(x), [self.width] * 3, dim=-1)
        q = torch.cat([turned(parts[axis], cos[axis], sin[axis]) for axis in range(3)], dim=-1)
        found = []
        for part in q.chunk(3, dim=-1):
            part = turned(part, cos, sin)
            found.append(part)
        return torch.cat(found, dim=-1)


class TurnedInPlace(Module):
    def forward(self, x, cos, sin):
        q = self.project(x)
        one, other = q[..., ::2], q[..., 1::2]
        out = torch.empty_like(q)
        out[..., ::2] = one * cos - other * sin
        out[..., 1::2] = other * cos + one * sin
        return out


class OnePart(Module):
    count = 1

    def forward(self, x):
        return self.project(x).chunk(self.count, -1)


class Tokens(Module):
    """A class token and the others; text and images; neither is as many as there are features."""

    def forward(self, x):
        y = self.project(x)
        text, image = y.split([self.width, self.width], dim=1)
        one, other = y.split(self.width, dim=1)
        return y[:, :1], y[:, 1:], text, image, one, other, self.act(y)


class Heads(Module):
    def forward(self, x):
        y = self.project(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2)
        again = torch.cat(self.project(x).split(self.size, 2), dim=0)
        return y @ again, y[:, :, -1:], self.project(x)[:, 0]


class Batch(Module):
    def forward(self, x):
        one, other = self.project(x).chunk(2)
        text, image = self.project(x).split([2, 3], dim=1)
        first, second = self.project(x).reshape(len(x) // 2, 2, -1, 24).unbind(1)
        return one, other, text, image, first, second


class Blocks(Module):
    """Keys in blocks of tokens, of which three neighbours are taken."""

    def forward(self, x):
        y = self.project(x).view(len(x), -1, self.heads, self.size).transpose(1, 2)
        y = y.view(len(x), self.heads, -1, self.width, self.size)
        return y[:, :, 1:-3] @ y[:, :, 2:-2].mT @ y[:, :, 3:-1]


class Residual(Module):
    def forward(self, x):
        x = x + self.project(x)
        one, other = x.chunk(2, -1)
        return one * other


class Behind(Module):
    def forward(self, x):
        a, b = self.second(self.project(x)).chunk(2, -1)
        return a * b


class Overridden(Chunk):
    def forward(self, x):
        return self.project(x)


class Trimmed(Channels):
    def forward(self, x):
        y = self.project(x)
        rows, columns = y.chunk(2, dim=2)
        return y[..., :-1], y[:, :8], rows, columns, F.pixel_shuffle(y, 2)


class Shuffled(Channels):
    def forward(self, x):
        b, _, h, w = x.shape
        y = self.project(x).view(b, 6, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
        return einops.rearrange(self.project(x), "b (c p q) h w -> b c (h p) (w q)", p=2, q=2), y


FUSED = {
    Chunk: "(b=3 r)",
    ChunkOfTwoAxes: "(b=3 r)",
    Split: "(b=3 r)",
    Sections: "r{16,4,4}",
    SectionsPerHead: "(r=2 r{8,4})",
    Unbound: "(b=3 r)",
    UnboundTwice: "(b=3 r)",
    Entries: "(b=3 r)",
    Unpacked: "(b=3 r)",
    Einops: "(b=3 r)",
    Slices: "r{SIZES}",
    EveryOther: "(r b=2)",
    Comprehension: "(b=3 r)",
    Mapped: "(b=3 r)",
    Helper: "(b=3 r)",
    Method: "(b=3 r)",
    Alias: "(b=3 r)",
    Checkpointed: "(b=3 r)",
    ByWeight: "(b=3 r)",
    Functional: "(b=3 r)",
    SumOfTwo: "(b=3 r)",
    ProductAndDifference: "(b=3 r)",
    Truncated: "(b=3 r)",
    KeptApart: "(b=3 r)",
    InALoop: "(b=3 r)",
    Gated: "(b=2 r)",
    Derived: "(b=3 r)",
    NoForward: "(b=3 r)",
    GateInAModule: "(b=2 r)",
    ScaleByNone: "(b=2 r)",
    ScaleUnsqueezed: "(b=2 r)",
    ScaleAsDeep: "(b=2 r)",
    ScaleViewed: "(b=2 r)",
    ScaleSplit: "r{8,16}",
    ScaleSplitEvenly: "(b=3 r)",
    ScaleSliced: "r{SIZES}",
    ScaleSlicedForImages: "r{SIZES}",
    ImageChannels: "(b=3 r)",
    ImageViews: "(b=3 r)",
}
WHOLE = [
    Rotated,
    TurnedInParts,
    TurnedInPlace,
    OnePart,
    Tokens,
    Heads,
    Batch,
    Blocks,
    Residual,
    Behind,
    Overridden,
    Trimmed,
    Shuffled,
]


def routed(module, **more):
    model = nn.ModuleDict({"layer": module, "head": nn.Linear(8, 3)})
    return nucleon.Leon.for_model(model, head="head", **more).explain()


@pytest.mark.parametrize("cls", FUSED, ids=lambda cls: cls.__name__)
def test_what_forward_takes_apart_is_one_matrix_with_a_warning_and_its_override(cls):
    with pytest.warns(UserWarning, match=r"not known: layer\.project\.weight") as caught:
        row = routed(cls())["layer.project.weight"]
    assert row.axes in ("r c", "r c c c") and "one matrix" in row.reason
    (said,) = (str(each.message) for each in caught)
    told = ast.literal_eval(re.findall(r"overrides=({.*})", said)[0])["*project.weight"]["axes"]
    assert told == row.axes.replace("r", FUSED[cls], 1)
    if "SIZES" in told:
        assert "write the sizes for SIZES" in said
        told = told.replace("SIZES", "16,8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        over = {"*project.weight": {"axes": told}}
        if cls is SumOfTwo:
            over["*second.weight"] = "matrix"
        assert routed(cls(), overrides=over)["layer.project.weight"].axes == told


@pytest.mark.parametrize(
    ("cls", "ways"),
    [
        (Chunk, ["the maps one after the other, as x.chunk", "head by head, in each"]),
        (Slices, ["the maps one after the other, as x.chunk"]),
        (EveryOther, ["the maps row by row in turn"]),
        (SectionsPerHead, ["the maps head by head, as the code cuts each"]),
    ],
)
def test_the_warning_says_how_the_maps_lie_in_each_override(cls, ways):
    with pytest.warns(UserWarning, match="not known") as caught:
        routed(cls())
    lines = str(caught[0].message).splitlines()[1:]
    offered, said = zip(*(line.split("  # ") for line in lines), strict=True)
    assert len({*offered}) == len(offered) == len(ways) + 1
    assert all(text.startswith(way) for text, way in zip(said, ways, strict=False)), said


@pytest.mark.parametrize("cls", WHOLE, ids=lambda cls: cls.__name__)
def test_what_forward_leaves_whole_is_not_warned_of(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cuts.read(cls()).cuts.get("project")
        routed(cls(), overrides={"*second.weight": "matrix"})


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.readout = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.taken, self.kept = nn.Linear(8, 24), nn.Linear(8, 24)

    def forward(self, x, h):
        r, z, n = (self.taken(self.embed(x)) + self.kept(h)).chunk(3, -1)
        return self.readout(r * z + n)


def test_what_is_taken_apart_is_not_said_to_be_a_missed_head():
    with pytest.warns(UserWarning) as caught:
        nucleon.Leon.for_model(Recurrent())
    (head,) = (str(w.message) for w in caught if "output head" in str(w.message))
    assert "and readout is stepped as a matrix; pass head='readout'" in head


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 12), nn.Linear(12, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.second(self.first(x).relu()))


class Outer(nn.Module):
    """Who takes apart what modules within its children give."""

    def __init__(self):
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(8, 16), nn.Dropout())
        named = OrderedDict(conv=nn.Conv1d(8, 16, 1), bn=nn.BatchNorm1d(16))
        self.channels = nn.ModuleDict(named)
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 16)])
        self.inner, self.perceptron = Residual(16), Perceptron()
        self.gated = nn.Sequential(nn.Linear(8, 16), nn.GLU())

    def forward(self, x):
        shift, scale = self.modulation(x).chunk(2, dim=-1)
        for count, layer in enumerate(self.layers):
            one, other = layer(x * count).chunk(2, -1)
        y = self.channels.bn(self.channels.conv(x))
        a, b = self.perceptron(self.gated(x)).chunk(2, -1)
        q, k = self.inner.project(x).chunk(2, dim=-1)
        return y.chunk(2, dim=1), shift * scale, one * other, q @ k.mT, a * b


def test_weights_within_a_child_are_found_from_where_its_output_is_cut():
    with pytest.warns(UserWarning, match="not known") as caught:
        rows = routed(Outer())
    told = ast.literal_eval(re.findall(r"overrides=({.*})", str(caught[0].message))[0])
    names = {row.name for row in rows if "several maps" in row.reason}
    assert names == {
        f"layer.{name}.weight"
        for name in (
            *("modulation.1", "channels.conv", "layers.0", "layers.1", "inner.project"),
            *("gated.0", "perceptron.second"),
        )
    }
    assert {wish["axes"] for wish in told.values()} == {"(b=2 r) c", "(b=2 r) c c"}


def test_code_that_cannot_be_read_says_nothing(monkeypatch):
    space = {"Module": Module}
    exec(
        "class Made(Module):\n def forward(self, x):\n  return self.project(x).chunk(3, -1)", space
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        routed(space["Made"]())
        monkeypatch.setattr(cuts, "_READ", {})
        monkeypatch.setattr(cuts, "read", lambda module: 1 / 0)
        routed(Chunk())


unread = eval("lambda y: y")


class BesideUnread(Module):
    def forward(self, x):
        a, b, c = self.project(x).chunk(3, -1)
        return unread(a) * b + c


def test_a_function_without_source_hides_nothing_beside_it():
    assert cuts.read(BesideUnread()).cuts["project"].parts == 3


def test_a_module_is_read_once_for_all_its_like(monkeypatch):
    asked = []
    monkeypatch.setattr(cuts, "_READ", {})
    real = cuts.read
    monkeypatch.setattr(cuts, "read", lambda module: asked.append(type(module)) or real(module))
    with pytest.warns(UserWarning, match="and 1 more"):
        routed(nn.ModuleList(Chunk() for _ in range(5)))
    assert asked.count(Chunk) == 1
    other = Chunk()
    other.project = nn.Conv1d(8, 24, 1)  # whose last axis is not its features
    assert not cuts.reading(other).cuts


class AlongDim(Module):
    def __init__(self, dim, layer, count=3):
        super().__init__()
        self.dim, self.count = dim, count
        self.project = nn.Sequential(layer)

    def forward(self, x):
        return self.project(x).chunk(self.count, self.dim)


def test_what_is_read_in_one_module_is_not_said_of_another_of_its_class():
    """Its own numbers and the modules within its children are part of what the code does."""
    linear, conv = nn.Linear(8, 24), nn.Conv1d(8, 24, 1)
    for found in (True, False) * 2:  # whichever came first
        assert bool(cuts.reading(AlongDim(-1, linear)).cuts) is True
        assert bool(cuts.reading(AlongDim(0 if found else -2, linear)).cuts) is False
        assert bool(cuts.reading(AlongDim(-1, conv)).cuts) is False
        assert bool(cuts.reading(AlongDim(-2, conv)).cuts) is True
        assert cuts.reading(AlongDim(-1, linear, 2)).cuts["project"].parts == 2


class Property(Module):
    @property
    def half(self):
        raise RuntimeError("not before the first batch")

    def forward(self, x):
        a, b = self.project(x).split([self.half, self.half], -1)
        return a * b


class Cancelled(Module):
    def forward(self, x):
        a, b = self.project(x).split([self.size, self.size - self.width], -1)
        return a * b


@pytest.mark.parametrize("cls", [Property, Cancelled])
def test_sizes_that_cannot_be_told_without_running_code_are_asked_for(cls):
    with pytest.warns(UserWarning, match=r"r\{SIZES\} c.*write the sizes for SIZES"):
        routed(cls())


def test_a_word_is_never_a_reason_to_stop(monkeypatch):
    cut = cuts.read(Sections()).cuts["project"]
    monkeypatch.setattr(fused, "in_sections", lambda sizes, rows: 1 / 0)
    assert cuts.word(cut, Sections(), 24) == "r{SIZES}"


def test_a_class_that_was_read_is_not_held():
    file = Path(__file__).with_name("made.py")
    code = "class Made(Module):\n def forward(self, x):\n  return self.project(x).chunk(3, -1)\n"
    space = {"Module": Module, "__name__": "made", "__file__": str(file)}
    linecache.cache[str(file)] = (len(code), None, code.splitlines(True), str(file))
    exec(compile(code, file, "exec"), space)
    model = space["Made"]()
    model.inner = space["Made"]()
    assert cuts.reading(model).cuts and cuts.reading(nn.Sequential(model)[0]).cuts
    held = weakref.ref(space["Made"]), weakref.ref(space["Made"].forward)
    del model, space
    gc.collect()
    assert [each() for each in held] == [None, None]
