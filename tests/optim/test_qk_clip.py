"""QK-clip: the logits of an explicit attention before and after, head by head.

`tests/distributed` has several ranks.
"""

import pytest
import torch
from torch import nn

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
    logits, size = attention(x), attention.head_dim
    clip = QKClip(0.5 * largest(logits).min().item())
    rows = {"query_rows": slice(0, 4 * size), "key_rows": slice(4 * size, 6 * size)}
    clip.watch("a", attention.qkv, attention.qkv, head_size=size, **rows)
    values = attention.qkv.weight[6 * size :].clone()
    clip.record("a", logits)
    clip.step()
    assert torch.equal(attention.qkv.weight[6 * size :], values)
    caps = torch.full((4,), clip.threshold, dtype=torch.float64)
    torch.testing.assert_close(largest(attention(x)), caps, rtol=1e-12, atol=1e-12)


def test_only_finite_logits_of_training_count_and_each_of_them_once():
    attention, x = make()
    clip = QKClip.for_model(attention, threshold=1e-3)

    def moves(*seen):
        before = [p.clone() for p in attention.parameters()]
        for inputs in seen:
            attention(inputs)
        clip.step()
        return not all(map(torch.equal, attention.parameters(), before))

    attention.eval()
    assert not moves(x)
    attention.train()
    assert not moves(x * torch.nan)
    clip.record("", torch.full((4, 2, 2), torch.inf))
    assert not moves()
    assert moves(x) and not moves()


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


def test_bad_input_is_named():
    attention, _ = make()
    projections, clip = (attention.q_proj, attention.k_proj), QKClip()
    clip.watch("a", *projections, head_size=3)
    normed = Attention()
    normed.q_norm = nn.RMSNorm(3)
    bad = [
        ("threshold", lambda: QKClip(0.0)),
        ("do not make heads", lambda: clip.watch("b", *projections, head_size=5)),
        ("'a' is watched already", lambda: clip.watch("a", *projections, head_size=3)),
        ("'b' is not watched; pass one of", lambda: clip.record("b", torch.zeros(4, 5, 5))),
        (r"\(…, 4, queries, keys\)", lambda: clip.record("a", torch.zeros(2, 3, 5, 5))),
        ("no attention", lambda: QKClip.for_model(nn.Linear(3, 3))),
        ("no attention", lambda: QKClip.for_model(normed)),
    ]
    for message, call in bad:
        with pytest.raises(ValueError, match=message):
            call()
