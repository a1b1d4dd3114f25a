"""What `make soak` has done, in one line for each count, over all of its processes."""

STATISTICS = "_hypothesis_stats"  # where hypothesis leaves them on a report


def pytest_terminal_summary(terminalreporter):
    """The sums of the properties that tests have recorded, and the examples of hypothesis."""
    counts: dict[str, int] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if isinstance(value, int):
                    counts[name] = counts.get(name, 0) + value
            if found := re.search(r"(\d+) passing examples", report.__dict__.get(STATISTICS, "")):
                counts["examples of functions"] = counts.get("examples of functions", 0) + int(
                    found[1]
                )
    for name, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count:>12,} {name}")
