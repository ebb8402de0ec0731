"""The tables of `make attack` and `make faults`: what was tried, and what held.

A test says what it shows: ``@pytest.mark.attack("wrong key")``, ``@pytest.mark.fault("kill -9")``.
If it tries more than once, it says how often: ``tried=1500`` in the marker,
``record_property("tried", 1500)``, or the fixture `rounds`.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest

KINDS = ("attack", "fault")  # the markers
CRASHED = "(a worker died)"  # its test cannot say what it tried


@dataclasses.dataclass
class Row:
    """One line of a table."""

    tried: int = 0
    held: int = 0
    tests: int = 0
    skipped: int = 0


def kind_of(config) -> str | None:
    """Return the marker that the tests were selected by, if it is one of ours."""
    chosen = config.getoption("markexpr", "")
    return chosen if chosen in KINDS else None


@pytest.fixture
def rounds(request, record_property):
    """Return how often to try: `few` times, or `many` in `make attack` and `make faults`."""

    def choose(few: int, many: int) -> int:
        number = few if kind_of(request.config) is None else many
        record_property("tried", number)
        return number

    return choose


def pytest_runtest_setup(item):
    for kind in KINDS:
        for mark in item.iter_markers(kind):
            item.user_properties.append((kind, mark.args[0]))
            if "tried" in mark.kwargs:
                item.user_properties.append(("tried", mark.kwargs["tried"]))


def rows_of(kind: str, stats) -> dict[str, Row]:
    """Return the rows of a table, from the reports of all tests by outcome."""
    broken = {report.nodeid for outcome in ("failed", "error") for report in stats.get(outcome, ())}
    rows: dict[str, Row] = collections.defaultdict(Row)
    seen = set()
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in stats.get(outcome, ()):
            if report.nodeid in seen:
                continue
            seen.add(report.nodeid)
            tried = sum([n for key, n in report.user_properties if key == "tried"]) or 1
            names = [name for key, name in report.user_properties if key == kind]
            for name in names or ([CRASHED] if outcome == "failed" else []):
                row = rows[name]
                if outcome == "skipped":
                    row.skipped += 1
                    continue
                row.tests += 1
                row.tried += tried
                row.held += 0 if report.nodeid in broken else tried
    return dict(sorted(rows.items()))


def pytest_terminal_summary(terminalreporter, exitstatus):
    kind = kind_of(terminalreporter.config)
    if kind is None:
        return
    rows = rows_of(kind, terminalreporter.stats)
    width = max([len(name) for name in rows] + [len(kind)])
    terminalreporter.section(f"{kind}s", sep="-")
    terminalreporter.write_line(f"{kind:{width}}  {'tests':>5}  {'tried':>6}  {'held':>6}")
    for name, row in rows.items():
        line = f"{name:{width}}  {row.tests:5}  {row.tried:6}  {row.held:6}"
        if row.skipped:
            line += f"  ({row.skipped} tests need what this machine lacks)"
        terminalreporter.write_line(line, red=row.held < row.tried)
    total = sum(row.tried for row in rows.values())
    lost = total - sum(row.held for row in rows.values())
    terminalreporter.write_line(f"{len(rows)} {kind}s, tried {total:,} times, not held {lost:,}")
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        terminalreporter.write_line("The run ended before all tests had run.", red=True)
