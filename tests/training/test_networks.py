import copy
import math
import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nucleon.training import GPT, MLP, GPTConfig, loss

CONFIG = GPTConfig(vocabulary=11, context=12, layers=2, heads=2, width=16)


def tokens(batch=3, length=12):
    return torch.randint(CONFIG.vocabulary, (batch, length))


def test_a_token_sees_itself_and_the_past_alone():
    model, x = GPT(CONFIG), tokens()
    changed = x.clone()
    changed[:, 7] = (x[:, 7] + 1) % CONFIG.vocabulary
    before, after = model(x), model(changed)
    assert before.shape == (3, 12, 11)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().amin(dim=(0, 2)).min() > 0  # all later ones see it


def test_attention_depends_on_distances_not_on_places():
    """Rotary positions: a window of one repeated prefix gives the same mixing wherever it starts.

    The attention of the last token over the last five is that of a text shifted by three, when what
    comes before is masked out: scores are functions of differences of positions.
    """
    from nucleon.training.models import _rotate, _rotation

    q, k = torch.randn(2, 12, 8, dtype=torch.float64)
    rotation = _rotation(12, 8, q)
    same_q, same_k = q[:1].expand(12, -1), k[:1].expand(12, -1)
    scores = _rotate(same_q, rotation) @ _rotate(same_k, rotation).mT
    for offset in (0, 1, 5):
        diagonal = scores.diagonal(-offset)
        # Angles are float32 numbers of at most 11 radians: 11·6e-8 each, times |q||k| ≈ 10.
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)
    assert (scores.diagonal(-5)[0] - scores.diagonal()[0]).abs() > 1e-3


def test_positions_matter():
    model, x = GPT(CONFIG), tokens(1)
    swapped = x.clone()
    x[0, :2], swapped[0, :2] = torch.tensor([1, 2]), torch.tensor([2, 1])
    assert not torch.allclose(model(x)[0, -1], model(swapped)[0, -1], atol=1e-6)


def test_a_fresh_model_knows_nothing():
    """The first loss is that of equal odds, ln 11, up to what a head of deviation 0.02 adds."""
    model = GPT(GPTConfig(vocabulary=11, width=64))
    x = torch.randint(11, (16, 128))
    assert loss(model, x[:, :-1], x[:, 1:]).item() == pytest.approx(math.log(11), abs=0.05)


def test_loss_is_the_cross_entropy_of_every_token():
    model, x = GPT(CONFIG), tokens()
    logits = model(x[:, :-1]).double().log_softmax(dim=-1)
    picked = [-logits[b, t, x[b, t + 1]] for b in range(3) for t in range(11)]
    assert loss(model, x[:, :-1], x[:, 1:]).item() == pytest.approx(
        torch.stack(picked).mean().item(), rel=1e-6
    )


def test_a_tied_head_is_the_embedding():
    config = GPTConfig(vocabulary=11, context=12, layers=1, heads=2, width=16, tied=True)
    model = GPT(config)
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len(list(GPT(CONFIG).blocks[0].parameters())) + 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 12, "heads": 4}, "multiple of 2·heads = 8"),
        ({"layers": 0}, "layers must be an integer ≥ 1"),
        ({"dropout": 1.0}, "dropout must lie in"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(**{"vocabulary": 11, **change})


def test_a_text_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="more than the context 12"):
        GPT(CONFIG)(tokens(1, 13))


def test_every_parameter_learns():
    for model, x, y in (
        (GPT(CONFIG), tokens(), tokens()),
        (MLP(), torch.rand(8, 64), torch.randint(10, (8,))),
    ):
        loss(model, x, y).backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_one_graph_whatever_the_length():
    """Compiled without a break; the eager backend is enough to see one."""
    model = GPT(CONFIG)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for length in (12, 9):
        x = tokens(2, length)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.fixture
def group():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_and_fsdp_take_it_as_it_is(group):
    """In a group of one: the same loss and the same gradients as the plain model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, x = GPT(CONFIG), tokens()
    replicated = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for model in (plain, replicated, sharded):
        loss(model, x[:, :-1], x[:, 1:]).backward()
    for a, b, c in zip(
        plain.parameters(), replicated.parameters(), sharded.parameters(), strict=True
    ):
        torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(a.grad, c.grad.full_tensor())
