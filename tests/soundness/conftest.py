"""Counts of `make soak`, one line for each, over all of its processes."""

import re
from collections import Counter

STATISTICS = "_hypothesis_stats"  # where hypothesis leaves them on a report


def examples(statistics: str) -> int:
    """Return the number of examples that passed, over all phases in the statistics of a test."""
    return sum(map(int, re.findall(r"(\d+) passing\b", statistics)))


def pytest_terminal_summary(terminalreporter):
    """The sums of the properties that tests have recorded, and the examples of hypothesis."""
    counts = Counter[str]()
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        # Those of hypothesis stand on the report of the teardown alone.
        counts["examples of functions"] += examples(getattr(report, STATISTICS, ""))
        if getattr(report, "when", None) != "call":  # properties stand on that of the teardown too
            continue
        for name, value in getattr(report, "user_properties", ()):
            counts[name] += value if isinstance(value, int) else 0
    for name, count in sorted((+counts).items()):  # those above zero
        terminalreporter.write_line(f"{count:>12,} {name}")
