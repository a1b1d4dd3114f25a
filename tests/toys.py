"""Claims that are measured at once, for the tests of what surrounds a claim."""

import functools

from nucleon.claims import Check, Claim, Figure, Panel, Series, Table

EVIL = '<script>alert("x")</script> & [bold]é'


def measure(run, passed=True, words="words"):
    run.each([{"seed": run.seed}], lambda: {"value": float("inf")})
    x = [1.0, 2.0, 4.0]
    first = Series(words, x, [3.0, 1.0, 30.0], [2.0, 0.5, 20.0], [4.0, 1.5, 40.0])
    second = Series("second", x, [1.0, float("nan"), 100.0], style=4)
    yield Check(words, 1.0 if passed else float("nan"), "≤", 1.0)
    yield Table(words, (words, "value"), ((words, 1.23456789), ('a "b", c', 50.0)))
    yield Figure("toy", words, words, (Panel(words, words, words, (first, second)),))
    yield words


def fail(run):
    raise ZeroDivisionError("by zero")


def toy(passed=True, name="toy", words="words", run=None):
    """A claim that says `words` wherever it can."""
    run = run or functools.partial(measure, passed=passed, words=words)
    return Claim(name, words, words, words, words, run, (1, 1))
