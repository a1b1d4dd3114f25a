"""QK-clip: keep the largest attention logit of every head below a cap by shrinking its weights.

Let S_h be the largest logit of head h since the last step. After each step of the optimizer, with
the cap τ and γ_h = min(1, τ/S_h),

    W_q,h ← √γ_h·W_q,h      W_k,h ← √γ_h·W_k,h

If several query heads share a key head, W_q,h ← γ_h·W_q,h and W_k is unchanged. This is the rule of
MuonClip (Kimi K2, arXiv 2507.20534). S_h is recorded by the attention that computes the logits, or
bounded by scale·max‖q_h‖·max‖k_h‖, which rotary embeddings do not change. With several ranks S_h is
the maximum over their batches, so that their weights stay equal.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nucleon import _checks
from nucleon.optim.matrices import shards

ALL = slice(None)


@dataclass
class _Side:
    """Queries or keys of an attention: rows of a projection, and their largest norms."""

    linear: nn.Linear
    rows: slice
    size: int
    """Rows of a head."""
    longest: Tensor
    """Largest norm since the last step, (heads,)."""
    here: slice = field(default_factory=lambda: ALL)
    """Heads that this rank computed in the last output; tensor parallelism divides them."""

    @property
    def heads(self) -> int:
        return len(self.longest)

    def observe(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Update the largest norms by outputs (…, rows) on this rank; a forward hook."""
        if not module.training:
            return
        output = output.detach()
        if shards.sharded(output) and any(p.is_partial() for p in output.placements):
            output = shards.full(output)  # partial sums of a row-wise projection
        columns, part = shards.box(output)[-1], shards.local(output)
        rows = range(self.linear.out_features)[self.rows]
        ends = [bisect_left(rows, edge) for edge in (columns.start, columns.stop)]
        if any(end % self.size for end in ends):
            raise ValueError(
                f"a rank holds columns {columns.start} to {columns.stop} of an attention's outputs "
                f"and so a part of a head of {self.size}; shard the projection between heads"
            )
        self.here = slice(*(end // self.size for end in ends))
        used = rows[slice(*ends)]
        mine = part[..., used.start - columns.start : used.stop - columns.start : used.step]
        if mine.numel():
            vectors = mine.unflatten(-1, (len(used) // self.size, self.size)).flatten(0, -3)
            norms = torch.linalg.vector_norm(vectors.to(self.longest.dtype), dim=-1).amax(0)
            self.longest = self.longest.to(norms.device)
            self.longest[self.here] = torch.maximum(self.longest[self.here], norms)

    def shrink(self, factor: Tensor) -> None:
        """Multiply the weight and bias of each head by its factor, on this rank."""
        rows = factor.new_ones(self.linear.out_features)
        rows[self.rows] = factor.repeat_interleave(self.size)
        for tensor in (self.linear.weight, cast(Tensor | None, self.linear.bias)):
            if tensor is not None:
                shards.check_supported(
                    "a projection of an attention", tensor, "QKClip cannot shrink it"
                )
                mine, part = rows[shards.box(tensor)[0]], shards.local(tensor)
                part.mul_(mine.to(part).reshape(-1, *[1] * (part.ndim - 1)))


@dataclass
class _Attention:
    """Both sides of an attention and its recorded logits."""

    query: _Side
    key: _Side
    scale: float
    recorded: Tensor
    """Largest recorded logit, (heads,), or −∞."""

    def logits(self) -> Tensor:
        """Return S, (heads,): recorded, or bounded by the norms."""
        keys = self.key.longest.repeat_interleave(self.query.heads // self.key.heads)
        recorded = self.recorded.to(keys.device)
        return torch.where(recorded.isneginf(), self.scale * self.query.longest * keys, recorded)


class QKClip:
    """Cap the attention logits of watched modules; call `step()` after the optimizer's.

    Args:
        threshold: τ, the cap (100.0, that of Kimi K2).
        group: the ranks with the same attentions (None: all ranks of torch.distributed, if it
            runs).
    """

    def __init__(self, threshold: float = 100.0, *, group: Any = None) -> None:
        self.threshold = _checks.positive("threshold", threshold)
        self.group = group
        self._attentions: dict[str, _Attention] = {}
        self._hooks: list[Any] = []

    @classmethod
    def for_model(
        cls, model: nn.Module, threshold: float = 100.0, *, group: Any = None
    ) -> "QKClip":
        """Watch every module of a model that has a `q_proj` and a `k_proj`, both Linear.

        The size of a head is `head_dim`. Attention with normalized queries and keys (`q_norm`) is
        left out: its logits are bounded, and scaling its weights has no effect. Raises if no
        attention remains.
        """
        clip = cls(threshold, group=group)
        for name, module in model.named_modules():
            query, key = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
            size = getattr(module, "head_dim", None)
            if not isinstance(query, nn.Linear) or not isinstance(key, nn.Linear):
                continue
            if isinstance(size, int) and not hasattr(module, "q_norm"):
                scale = getattr(module, "scaling", None)
                clip.watch(name, query, key, head_size=size, scale=scale)
        if not clip._attentions:
            raise ValueError(
                f"{type(model).__name__} has no attention with Linear q_proj and k_proj, a "
                f"head_dim and no q_norm; use watch() for each of its attentions"
            )
        return clip

    def watch(
        self,
        name: str,
        query: nn.Linear,
        key: nn.Linear,
        *,
        head_size: int,
        scale: float | None = None,
        query_rows: slice = ALL,
        key_rows: slice = ALL,
    ) -> None:
        """Watch an attention by the outputs of its projections in training mode, until `close()`.

        Args:
            name: name of the attention in `record` and `diagnostics`.
            query: projection whose rows are heads of `head_size` one after the other.
            key: likewise, perhaps the same module; its number of heads divides that of the query.
            head_size: rows of a head.
            scale: factor on q·k (None: head_size^(-1/2)).
            query_rows: rows of the queries in a fused module (all).
            key_rows: rows of the keys (all).
        """
        _checks.count("head_size", head_size)
        if name in self._attentions:
            raise ValueError(f"{name!r} is watched already; give each attention its own name")
        counts = [
            len(range(linear.out_features)[rows])
            for linear, rows in ((query, query_rows), (key, key_rows))
        ]
        if any(n == 0 or n % head_size for n in counts) or counts[0] % counts[1]:
            raise ValueError(
                f"{name}: {counts[0]} query rows and {counts[1]} key rows do not make heads of "
                f"{head_size}, the same number of queries a key; correct head_size, query_rows or "
                f"key_rows"
            )
        # On the weight's device, but plain: new_zeros of a DTensor is a DTensor.
        local, wide = shards.local(query.weight), _checks.work_dtype(query.weight.dtype)
        zeros = [local.new_zeros(count // head_size, dtype=wide) for count in counts]
        queries = _Side(query, query_rows, head_size, zeros[0])
        keys = _Side(key, key_rows, head_size, zeros[1])
        unseen = torch.full_like(queries.longest, -torch.inf)
        factor = head_size**-0.5 if scale is None else float(scale)
        self._attentions[name] = _Attention(queries, keys, factor, unseen)
        for side in (queries, keys):
            # It runs before the hooks of tensor parallelism, which return plain local outputs.
            self._hooks.append(side.linear.register_forward_hook(side.observe, prepend=True))

    @torch.no_grad()
    def record(self, name: str, logits: Tensor) -> None:
        """Record the logits (…, heads, queries, keys) of a watched attention, masked ones as −∞.

        They replace the bound, which is larger. With tensor parallelism pass the heads of this
        rank.
        """
        if name not in self._attentions:
            raise ValueError(f"{name!r} is not watched; pass one of {list(self._attentions)}")
        attention = self._attentions[name]
        heads = logits.shape[-3] if logits.ndim >= 3 else 0
        here = ALL if heads == attention.query.heads else attention.query.here
        if heads != len(attention.recorded[here]):
            raise ValueError(
                f"logits of {name!r} must be (…, {attention.query.heads}, queries, keys), got "
                f"{tuple(logits.shape)}"
            )
        wide = logits.detach().to(attention.recorded.dtype)
        largest = wide.amax((-2, -1)).reshape(-1, heads).amax(0)
        attention.recorded = attention.recorded.to(largest.device)
        attention.recorded[here] = torch.maximum(attention.recorded[here], largest)

    @torch.no_grad()
    def step(self) -> None:
        """Shrink the heads whose logits exceeded the cap, and reset the logits; no synchronization.

        Every rank of the group must call it.
        """
        attentions = self._attentions.values()
        # Non-finite logits do not tell how much to shrink.
        each = [a.logits().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for a in attentions]
        if each and dist.is_available() and dist.is_initialized():
            every = torch.cat([largest.to(each[0]) for largest in each])
            dist.all_reduce(every, dist.ReduceOp.MAX, group=self.group)
            each = every.split([len(largest) for largest in each])
        for attention, largest in zip(attentions, each, strict=True):
            factor = self.threshold / largest.clamp_min(self.threshold)
            if attention.query.heads == attention.key.heads:
                attention.query.shrink(factor.sqrt())
                attention.key.shrink(factor.sqrt())
            else:
                attention.query.shrink(factor)
            for tensor in (attention.query.longest, attention.key.longest):
                tensor.zero_()
            attention.recorded.fill_(-torch.inf)

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """Return the largest logit of each attention since `step()` on this rank; syncs."""
        return {
            f"qk_clip/{name}/largest_logit": attention.logits().amax().item()
            for name, attention in self._attentions.items()
        }

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._attentions.clear()
