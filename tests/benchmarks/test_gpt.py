"""The network and the tokens of the benchmarks."""

import sys
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpt import BYTES, GPT, WORD, BytePairs, Text, merged


def model(vocabulary=11, width=16):
    return GPT(vocabulary, context=12, layers=2, heads=2, width=width)


def test_a_token_sees_itself_and_the_past_alone():
    network, x = model(), torch.randint(11, (3, 12))
    changed = x.clone()
    changed[:, 7] = (x[:, 7] + 1) % 11
    before, after = network(x), network(changed)
    assert before.shape == (3, 12, 11)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().amin(dim=(0, 2)).min() > 0  # all later ones see it


def slow_pairs(content, count):
    """Byte pairs by the definition: count all, replace all, again."""
    words = [list(word.encode()) for word in WORD.findall(content)]
    merges = []
    for number in range(BYTES, BYTES + count):
        pairs = [pair for word in words for pair in pairwise(word)]
        most = max(map(pairs.count, pairs))
        if most < 2:
            break
        best = min(pair for pair in pairs if pairs.count(pair) == most)
        words = [merged(word, best, number) for word in words]
        merges.append(best)
    return tuple(merges), [token for word in words for token in word]


def test_byte_pairs_are_those_of_the_definition():
    content = "the cat sat on the mat, aaaa aa; wieß 漢字 the end\n" * 3
    pairs = BytePairs.learn(content, BYTES + 20)
    merges, tokens = slow_pairs(content, 20)
    assert pairs.merges == merges
    assert pairs.encode(content).tolist() == tokens


def test_a_batch_is_a_function_of_its_number_and_the_seed():
    tokens = torch.arange(50)
    text = Text(tokens[:40], tokens[40:], 50, context=4)
    inputs, targets = text.batch(3, 100, seed=1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and torch.equal(inputs + 1, targets)
    assert (inputs.min(), targets.max()) == (0, 39)
    assert torch.equal(inputs, text.batch(3, 100, seed=1)[0])
    assert not torch.equal(inputs, text.batch(4, 100, seed=1)[0])
    judged = torch.cat([inputs for inputs, _ in text.judged(1)])
    assert judged.tolist() == [[40, 41, 42, 43], [45, 46, 47, 48]]
