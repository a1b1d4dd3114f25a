"""QK-clip: the logits of an explicit attention before and after, head by head."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from nucleon.optim.qk_clip import QKClip


class Attention(nn.Module):
    def __init__(self, heads=4, key_heads=4, size=3, bias=True, fused=False):
        super().__init__()
        self.heads, self.key_heads, self.head_dim = heads, key_heads, size
        if fused:
            self.qkv = nn.Linear(8, (heads + 2 * key_heads) * size, bias=bias)
        else:
            self.q_proj = nn.Linear(8, heads * size, bias=bias)
            self.k_proj = nn.Linear(8, key_heads * size, bias=bias)

    def forward(self, x):
        if hasattr(self, "qkv"):
            sizes = (self.heads, self.key_heads, self.key_heads)
            q, k, _ = self.qkv(x).split([n * self.head_dim for n in sizes], dim=-1)
        else:
            q, k = self.q_proj(x), self.k_proj(x)
        q = q.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        k = k.unflatten(-1, (self.key_heads, -1)).transpose(-3, -2)
        k = k.repeat_interleave(self.heads // self.key_heads, dim=-3)
        return q @ k.mT * self.head_dim**-0.5


def make(**options):
    torch.manual_seed(0)
    return Attention(**options).double(), torch.randn(2, 5, 8, dtype=torch.float64)


def largest(logits):
    return logits.amax((0, 2, 3))


def norms_bound(attention, x):
    """scale·max‖q‖·max‖k‖ per query head, from the weights themselves."""

    def longest(linear, heads):
        y = x @ linear.weight.T + (linear.bias if linear.bias is not None else 0)
        return y.unflatten(-1, (heads, -1)).norm(dim=-1).amax((0, 1))

    queries = longest(attention.q_proj, attention.heads)
    keys = longest(attention.k_proj, attention.key_heads)
    keys = keys.repeat_interleave(attention.heads // attention.key_heads)
    return attention.head_dim**-0.5 * queries * keys


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_recorded_logits_end_at_the_cap_and_others_stay(key_heads, bias):
    attention, x = make(key_heads=key_heads, bias=bias)
    logits = attention(x)
    cap = largest(logits).median().item()
    clip = QKClip(cap)
    clip.watch("a", attention.q_proj, attention.k_proj, head_size=3)
    clip.record("a", logits)
    clip.step()
    factor = (cap / largest(logits)).clamp_max(1.0)
    torch.testing.assert_close(
        attention(x), logits * factor[None, :, None, None], rtol=1e-12, atol=1e-12
    )
    assert (factor < 1).any() and (factor == 1).any()


@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_bound_by_norms_needs_no_logits(key_heads):
    attention, x = make(key_heads=key_heads)
    before = norms_bound(attention, x)
    cap = before.median().item()
    clip = QKClip.for_model(attention, threshold=cap)
    attention(x)
    expected = attention(x) * (cap / before).clamp_max(1.0)[None, :, None, None]
    clip.step()
    torch.testing.assert_close(attention(x), expected, rtol=1e-12, atol=1e-12)
    assert (norms_bound(attention, x) <= cap * (1 + 1e-12)).all()
    assert (attention(x).abs() <= cap * (1 + 1e-12)).all()


def test_a_fused_projection_is_watched_by_its_rows():
    attention, x = make(key_heads=2, fused=True)
    logits = attention(x)
    clip = QKClip(0.5 * largest(logits).min().item())
    size = attention.head_dim
    rows = {"query_rows": slice(0, 4 * size), "key_rows": slice(4 * size, 6 * size)}
    clip.watch("a", attention.qkv, attention.qkv, head_size=size, **rows)
    values = attention.qkv.weight[6 * size :].clone()
    clip.record("a", logits)
    clip.step()
    assert torch.equal(attention.qkv.weight[6 * size :], values)
    torch.testing.assert_close(
        largest(attention(x)),
        torch.full((4,), clip.threshold, dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )


def test_what_was_seen_is_forgotten_and_only_training_counts():
    attention, x = make()
    clip = QKClip.for_model(attention, threshold=1e-3)
    attention.eval()
    attention(x)
    before = [p.clone() for p in attention.parameters()]
    clip.step()
    attention.train()
    clip.step()
    assert all(torch.equal(p, q) for p, q in zip(attention.parameters(), before, strict=True))
    attention(x)
    clip.step()
    shrunk = [p.clone() for p in attention.parameters()]
    clip.step()
    assert all(torch.equal(p, q) for p, q in zip(attention.parameters(), shrunk, strict=True))


def test_logits_that_are_not_finite_change_nothing():
    attention, x = make()
    clip = QKClip.for_model(attention, threshold=1e-3)
    before = [p.clone() for p in attention.parameters()]
    attention(x * torch.nan)
    clip.step()
    clip.record("", torch.full((4, 2, 2), torch.inf))
    clip.step()
    assert all(torch.equal(p, q) for p, q in zip(attention.parameters(), before, strict=True))


def test_diagnostics_and_closing():
    attention, x = make()
    clip = QKClip.for_model(attention)
    assert clip.diagnostics() == {"qk_clip//largest_logit": 0.0}
    logits = attention(x)
    assert clip.diagnostics()["qk_clip//largest_logit"] == pytest.approx(
        norms_bound(attention, x).max().item(), rel=1e-6
    )
    clip.record("", logits)
    assert clip.diagnostics()["qk_clip//largest_logit"] == pytest.approx(logits.max().item())
    clip.step()
    assert clip.diagnostics() == {"qk_clip//largest_logit": 0.0}
    clip.close()
    assert clip.diagnostics() == {} and not attention.q_proj._forward_hooks


def clip_on_a_rank(rank, folder, cut, answers):
    """Clip on a rank with its own inputs, and send the whole weights afterwards."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    attention, x = make(key_heads=2)
    clip = QKClip.for_model(attention, threshold=0.1)
    attention(x * (1 + rank))
    if cut:
        mesh = init_device_mesh("cpu", (2,))
        for linear in (attention.q_proj, attention.k_proj):
            for key, p in list(linear.named_parameters()):
                setattr(linear, key, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    clip.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in attention.parameters()]
    answers.put((rank, [p.detach().tolist() for p in whole]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "sharded"])
def test_ranks_with_other_batches_shrink_alike(cut, tmp_path):
    """The oracle is one process whose batch is the one with the larger logits."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    arguments = (str(tmp_path), cut, answers)
    ranks = [context.Process(target=clip_on_a_rank, args=(r, *arguments)) for r in range(2)]
    for process in ranks:
        process.start()
    weights = dict(answers.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    attention, x = make(key_heads=2)
    before = [p.detach().clone() for p in attention.parameters()]
    clip = QKClip.for_model(attention, threshold=0.1)
    attention(x * 2)
    clip.step()
    for rank in range(2):
        for p, got in zip(attention.parameters(), weights[rank], strict=True):
            torch.testing.assert_close(
                torch.tensor(got, dtype=torch.float64), p.detach(), rtol=1e-14, atol=1e-15
            )
    assert any(not torch.equal(p, b) for p, b in zip(attention.parameters(), before, strict=True))


def test_bad_input_is_named():
    attention, _ = make()
    with pytest.raises(ValueError, match="threshold"):
        QKClip(0.0)
    clip = QKClip()
    with pytest.raises(ValueError, match="do not make heads"):
        clip.watch("a", attention.q_proj, attention.k_proj, head_size=5)
    clip.watch("a", attention.q_proj, attention.k_proj, head_size=3)
    with pytest.raises(ValueError, match="watched already"):
        clip.watch("a", attention.q_proj, attention.k_proj, head_size=3)
    with pytest.raises(ValueError, match=r"\(…, 4, queries, keys\)"):
        clip.record("a", torch.zeros(2, 3, 5, 5))
    with pytest.raises(ValueError, match="not watched"):
        clip.record("b", torch.zeros(4, 5, 5))
    with pytest.raises(ValueError, match="no attention"):
        QKClip.for_model(nn.Linear(3, 3))
    normed = Attention()
    normed.q_norm = nn.RMSNorm(3)
    with pytest.raises(ValueError, match="no attention"):
        QKClip.for_model(normed)
