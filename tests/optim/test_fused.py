"""The kernels of a whole step, in Triton's interpreter; on the GPU they are in `tests/gpu`."""

import gc
import weakref
from itertools import chain

import pytest
import torch

import nucleon
from nucleon.optim.engines.cuda import addresses
from nucleon.optim.engines.cuda.addresses import Side, layout_of
from nucleon.optim.matrices import stacks
from optim.step_cases import AGREE, ALONE, OTHERS
from soaking import some


def room(entries=2**20):
    return lambda *_: entries


@pytest.mark.parametrize("case", [*some(AGREE), *OTHERS, *ALONE])
def test_the_fused_step_in_the_interpreter(case, check_in_interpreter):
    check_in_interpreter("optim.step_cases", case)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((6, 8), "r c"),
        ((3, 6, 8), "b r c"),
        ((6, 8), "(b=3 r) c"),
        ((6, 8), "r (b=2 c)"),
        ((6, 8), "r{2,4} c"),
        ((2, 3, 6, 8), "b b r c"),
        ((4, 3, 2, 2), "r c c c"),
        ((12, 3, 2, 2), "(b=4 r) c c c"),
        ((6, 8), "c r"),
        ((6, 12), "c (b=3 r)"),
        ((6, 8), "(b=3 c) r"),
        ((5, 2, 3, 3), "c r c c"),
        ((12, 8), "(r=2 b=3 r) c"),
        ((3, 12, 4), "b (r=2 b=3 r) c"),
        ((1, 8), "r c"),
    ],
)
@pytest.mark.parametrize("order", ["contiguous", "transposed", "channels last"])
def test_the_layout_says_where_the_matrices_are(shape, spec, order):
    param = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    if order == "transposed":
        if param.ndim > 3:
            pytest.skip("a kernel whose taps are transposed has columns of three strides")
        param = param.mT.contiguous().mT
    if order == "channels last":
        param = param.movedim(1, -1).contiguous().movedim(-1, 1)
    for stack in stacks.build([(param, spec)], room(20)):  # pieces of a few matrices
        expected = torch.cat([piece.matrices(param) for piece in stack.pieces])
        expected = stacks.short_side_first(expected)
        assert torch.equal(read(param, stack, layout_of(stack)), expected)
        moved = read(param, stack, layout_of(stack, in_order=False))
        columns = [expected[0, 0].tolist().index(x) for x in moved[0, 0].tolist()]
        assert sorted(columns) == [*range(expected.shape[-1])]
        assert torch.equal(moved, expected[..., columns])


def read(param, stack, layout):
    """The matrices of a stack, short side first, as a layout finds them in the memory."""
    memory = param.as_strided((param.numel(),), (1,))
    m, n = sorted(stack.shape)
    at = along(layout.short, m)[:, None] + along(layout.long, n)
    starts = [
        offset + k * layout.inner for offset in chain(*layout.offsets) for k in range(layout.each)
    ]
    return torch.stack([memory[start + at] for start in starts])


def along(side, length):
    k = torch.arange(length)
    return k // side.size * side.stride + k % side.size * side.within


def test_a_wide_kernel_in_channels_last_memory_is_read_as_it_lies():
    param = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    (stack,) = stacks.build([(param, "r c c c")], room())
    assert layout_of(stack).long.size > 1
    assert layout_of(stack, in_order=False).long == Side(1)


def test_no_layout_where_one_rule_does_not_do():
    unequal = stacks.build([(torch.zeros(4, 10), "r (b=2 c)"), (torch.zeros(4, 5), None)], room())
    assert len(unequal) == 1
    assert layout_of(unequal[0]) is None
    three = stacks.build([(torch.zeros(2, 3, 2, 5, 2, 7), "r b r b r c")], room())
    assert [layout_of(stack) for stack in three] == [None]
    for irregular in (torch.zeros(8).expand(6, 8), torch.zeros(6, 16)[:, ::2]):
        assert [layout_of(stack) for stack in stacks.build([(irregular, None)], room())] == [None]


def test_pieces_of_unequal_counts_are_cut_into_equal_runs():
    """Queries, keys and values in one weight, beside a projection of the same shape."""
    params = [torch.arange(n * 20.0).view(n * 4, 5) for n in (3, 1, 6)]
    specs = ["(b=3 r) c", None, "(b=6 r) c"]
    for given, each in ((slice(0, 3), 1), (slice(0, 3, 2), 3)):
        pairs = list(zip(params, specs, strict=True))[given]
        (stack,) = stacks.build(pairs, room())
        layout = layout_of(stack)
        assert layout is not None and layout.each == each
        assert layout.count == sum(piece.count for piece in stack.pieces)
        for piece, offsets in zip(stack.pieces, layout.offsets, strict=True):
            starts = piece.matrices(piece.param)[::each, 0, 0].long()
            assert starts.tolist() == list(offsets)


def test_an_address_is_only_taken_of_what_lies_as_it_should():
    param = torch.zeros(8, 8)
    (stack,) = stacks.build([(param, None)], room())
    layout, here = layout_of(stack), param.device
    assert layout is not None
    assert addresses.of_tensors(layout, [param], here) == [param.data_ptr()]
    for other in (
        param.double(),
        torch.zeros(8, 16)[:, ::2],
        param.to("meta"),
        torch.zeros(8).expand(8, 8),
    ):
        assert addresses.of_tensors(layout, [other], here) is None
    assert addresses.of_tensors(layout, [param], torch.device("meta")) is None
    for start, alignment in ((0, 16), (1, 4), (4, 16)):
        places = addresses.of_tensors(layout, [torch.zeros(68)[start:][:64].view(8, 8)], here)
        assert places is not None and addresses.alignment(places, 4) == alignment


def test_addresses_that_are_arguments_of_kernels_are_exact(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    places, table = [0, 2**61, 2**62 - 1, 140_000_000_000_017, 5], torch.full((5,), 7)
    addresses.send(places, table)
    assert table.tolist() == places


def stepped(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer._worklist


def test_the_list_of_work_is_made_once_also_for_many_groups():
    groups = [{"params": [torch.zeros(3, 4, requires_grad=True)]} for _ in range(40)]
    optimizer = nucleon.Muon(groups)
    first = stepped(optimizer)
    optimizer.param_groups[0] |= {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}
    optimizer.param_groups[1]["params"][0].grad = None
    optimizer.step()
    assert stepped(optimizer) is first


def other_entries(optimizer, param):
    param.data = torch.zeros(5, 4)
    optimizer.state[param] = optimizer._new_state(optimizer.param_groups[0], param, owned=True)


def other_strides(optimizer, param):
    param.data = torch.zeros(4, 3).mT


def other_dtype(optimizer, param):
    param.data = param.data.double()
    param.grad = None


def loaded(optimizer, param):
    optimizer.load_state_dict(optimizer.state_dict())


def another_state(optimizer, param):
    optimizer.state[param] = {name: x.clone() for name, x in optimizer.state[param].items()}


def another_group(optimizer, param):
    optimizer.add_param_group({"params": [torch.zeros(2, 2, requires_grad=True)]})


def another_option(optimizer, param):
    optimizer.param_groups[0]["method"] = "svd"


def own_coefficients(optimizer, param):
    optimizer.param_groups[0]["coefficients"] = [(1.5, -0.5, 0.0)]


@pytest.mark.parametrize(
    "change",
    [
        *(other_entries, other_strides, other_dtype, loaded),
        *(another_state, another_group, another_option, own_coefficients),
    ],
)
def test_another_structure_makes_another_list(change):
    param = torch.zeros(3, 4, requires_grad=True)
    optimizer = nucleon.Muon([param])
    first = stepped(optimizer)
    param.grad = None
    change(optimizer, param)
    second = stepped(optimizer)
    assert second is not first
    assert second.works[0].stack.shape == tuple(param.shape)
    assert param.any()


def test_an_optimizer_is_gone_with_its_last_name():
    """Not when the collector comes: its moments, and on CUDA its graphs, are memory."""
    optimizer = nucleon.Leon([torch.zeros(3, 4, requires_grad=True)])
    stepped(optimizer)
    optimizer.diagnostics()
    watched = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert watched() is None
    finally:
        gc.enable()
