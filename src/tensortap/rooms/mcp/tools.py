"""The tools: questions about runs and live sessions, answered as bounded JSON.

A run is asked for by its id in `runs`, never by a path: clients see the folders of the command
line, and nothing else. The docstring of a tool is what a client reads about it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensortap.alerts.alert import HINT
from tensortap.api.open import RemoteSession
from tensortap.core.arguments import parse_steps
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.files import plain
from tensortap.core.patterns import TypedPattern
from tensortap.core.record import Kind
from tensortap.core.rooms import offer
from tensortap.live.address import parse_address
from tensortap.page.catalog import Catalog, CatalogEntry, RunEntry, SessionEntry, describe_entry
from tensortap.page.routes import summary_of
from tensortap.rooms.compare.runs import compare_runs
from tensortap.rooms.figures.selection import choose_kind, choose_metrics
from tensortap.rooms.health import report as rules
from tensortap.rooms.mcp.answers import answer
from tensortap.rooms.ops.verdicts import NO_VERDICT, verdict_of, verdicts_of
from tensortap.runs.rows import STATISTICS
from tensortap.table.columns import VALUE
from tensortap.table.frames import choose_rank
from tensortap.table.table import Table


class Tools:
    """Answers questions about the runs and sessions of the command line."""

    def __init__(self, what: Sequence[str]) -> None:
        self._catalog = Catalog()
        for each in what:
            self._catalog.add(each)
        self._folder = None if what else Path("runs")  # it may appear later

    def close(self) -> None:
        """Close the connections to live sessions."""
        self._catalog.close()

    def runs(self, offset: int = 0, limit: int = 50) -> str:
        """List live sessions with their jobs, then runs, newest first. Other tools take the id."""
        rows = self._entries(sessions=True)
        return answer({}, rows, offset, limit, lambda entry: _without(_described(entry), "config"))

    def summary(self, run: str = "") -> str:
        """Summarize a run or live session: state, steps, last metrics, first problem, config.

        `run` is an id of `runs`; by default it is the newest run.
        """
        entry = self._entry(run)
        table = entry.table().index()
        counts = {"records": len(table), "names": len(table.names), "kinds": table.kinds}
        found = _described(entry) | summary_of(entry) | counts
        return answer(found | {"ranks": table.ranks(), "statistics": table.statistics()})

    def names(
        self, run: str = "", pattern: str = "", kind: str = "", offset: int = 0, limit: int = 100
    ) -> str:
        """List names with kind, number of records, and first and last step.

        `pattern` is a regular expression (RE2) that matches anywhere in a name. `kind` is
        Activation, Gradient, Weight, Weight_Gradient, Optimiser_State, Value, Metric, …
        """
        table = self._entry(run).table().index()
        found = [each for each in _names(table, pattern) if kind in ("", each[1])]

        def row(pair: tuple[str, str]) -> dict[str, Any]:
            steps = table.step[table.series(pair[1], pair[0], ordered=False)]
            found = (*pair, len(steps), steps.min(), steps.max())
            return dict(zip("name kind records first_step last_step".split(), found, strict=True))

        return answer({}, found, offset, limit, row)

    def statistics(
        self, name: str, run: str = "", kind: str = "", statistics: list[str] | None = None,
        steps: str = "", rank: int | None = None, offset: int = 0, limit: int = 50,
    ) -> str:  # fmt: skip
        """Return statistics of a tensor or number over steps, exactly as recorded.

        `statistics` chooses some of: value, count, zeros, nans, posinfs, neginfs, min, max, mean,
        std, mean_abs, max_abs, min_abs, rm2, rm4, rm8, of which all but the counts are of finite
        values; null was not recorded. `steps` are like 10:20, 10: or :20. By default what several
        ranks recorded is merged; `rank` is one of them.
        """
        entry = self._entry(run)
        table = entry.table()
        pairs = sorted(_names(table.index()), key=lambda pair: pair[0] == name)  # it wins
        kinds = {k: n for n, k in pairs if name in (n, plain(n))}
        if not kinds or (kind and kind not in kinds):
            there = f"; it has {', '.join(kinds)}" if kinds else ": see names"
            raise NotFound(f"no {kind or 'record'} {name!r}{there}")
        kind = kind or next(iter(kinds))
        if isinstance(entry, RunEntry) and kind in (Kind.VALUE, Kind.LOCAL):
            entry.complete()  # of tensors that were caught
        wanted = choose_metrics(table, statistics or [VALUE, *STATISTICS])
        table, of_rank = choose_rank(table, rank)
        rows = table.series(kind, kinds[kind], of_rank)
        first, last = parse_steps(steps) or (None, None)
        after = table.step[rows] >= (-math.inf if first is None else first)
        rows = rows[after & (table.step[rows] <= (math.inf if last is None else last))]
        known = {each: table.is_known(each, rows) for each in wanted}
        wanted = [each for each in wanted if known[each].any()]

        def row(number: int) -> dict[str, Any]:
            at = rows[number]
            found = {each: table.column(each)[at] for each in wanted if known[each][number]}
            return {"step": table.step[at], "rank": table.rank[at]} | dict.fromkeys(wanted) | found

        facts = {"name": name, "kind": kind, "kinds": list(kinds)}
        return answer(facts, range(len(rows)), offset, limit, row)

    def alerts(self, run: str = "", rule: str = "", offset: int = 0, limit: int = 30) -> str:
        """List what training raised: alerts by step, then hints, with their reasons.

        `origin` is the module where it began, `why` the operation behind it if that is known,
        `again` how often it was found again. `rule` chooses one rule.
        """
        entry = self._entry(run)
        found = [*entry.alerts(), *entry.table().alerts(HINT)]
        explained_by = verdicts_of(found)

        def row(alert: Any) -> dict[str, Any]:
            why = getattr(explained_by(alert), "message", "")
            return _without(msgspec.structs.asdict(alert), "explanation", "call") | {"why": why}

        chosen = [alert for alert in found if rule in ("", alert.rule)]
        return answer({}, chosen, offset, limit, row)

    def health(self, run: str = "", state: str = "", offset: int = 0, limit: int = 50) -> str:
        """Return what each rule found, worst first: where, since when, and what to do.

        `state` chooses problem, hint, blind (it could not look), fine or unknown (not active); by
        default all but fine and unknown. A run that was tracked without rules is checked now.
        """
        entry = self._entry(run)
        rows = rules.health_of(entry.table(), entry.reader(), compute=True)
        states = (state,) if state else ("problem", "hint", "blind")
        found = [row for row in rows if row.state in states]
        return answer({"summary": rules.summary_of(rows)}, found, offset, limit)

    def compare(self, a: str, b: str, pattern: str = "", offset: int = 0, limit: int = 10) -> str:
        """Compare two runs: `first` is the first difference in the order of execution.

        `b` is the reference, `culprit` the first module whose inputs agree and whose output does
        not. `rows` are the differences, `missing` what one run lacks. `pattern` (RE2) is of names.
        """
        entries = [self._entry(each) for each in (a, b)]
        # a path is opened anew: what is compared must not change meanwhile
        sides = [each.path if isinstance(each, RunEntry) else each.reader() for each in entries]
        names = TypedPattern(pattern) if pattern else None
        found = compare_runs(*sides, names=names).to_json()
        differences = found.pop("differences")
        return answer(found | {"missing_total": len(found["missing"])}, differences, offset, limit)

    def why(self, run: str = "", step: int | None = None, rank: int | None = None) -> str:
        """Explain the first NaN or Inf: its operation, line, operands, and what led there."""
        found = verdict_of(self._entry(run).table().alerts(), step, rank)
        if found is None:
            raise NotFound(NO_VERDICT)
        return answer(msgspec.structs.asdict(found))

    def figure(
        self, run: str = "", figure: str = "heatmap", kind: str = "", statistic: str = "rm2",
        pattern: str = "", offset: int = 0, limit: int = 40,
    ) -> tuple[bytes, str]:  # fmt: skip
        """Draw a PNG of a statistic of several names over steps: a `heatmap`, or `lines`.

        `pattern` (RE2) chooses names; `offset` and `limit` which of them: at most 40 in a heatmap,
        8 in lines. `statistic` is one of `statistics`, or auto: the value, or the RMS of a tensor.
        """
        from tensortap.rooms.mcp.pictures import draw

        if figure not in ("heatmap", "lines"):
            raise TensortapError(f"figure must be heatmap or lines, got {figure!r}")
        table, _ = choose_rank(self._entry(run).table(), None)
        kind = kind or choose_kind(table, None)[0]
        names = [name for name, each in _names(table, pattern) if each == kind]
        shown = names[max(0, offset) :][: min(limit, 40 if figure == "heatmap" else 8)]
        if not shown:
            raise NotFound(f"no {kind} from offset {offset} on matches {pattern!r}")
        first, *_, last = [*table.steps(kind).tolist()] * 2
        inc = math.ceil((last - first + 1) / 120)  # so many columns are few bytes
        drawn = draw(table, kind, statistic, shown, inc, is_map=figure == "heatmap")
        facts = {"kind": kind, "statistic": statistic, "steps_per_column": inc}
        return drawn, answer(facts, names, offset, len(shown))

    def probes(self, session: str = "", pattern: str = "", offset: int = 0, limit: int = 90) -> str:
        """List probes of running jobs that match a pattern (RE2): their state, and their cost."""
        with RemoteSession(session or None) as opened:
            return _listed(offer("session.probes")(opened, pattern), offset, limit)

    def probe(
        self, pattern: str, session: str = "", every: int | None = None, tensors: bool = False,
        steps: int | None = None, off: bool = False,
    ) -> str:  # fmt: skip
        """Switch probes of a running job on, or with `off` off, at a step that all ranks share.

        `every` n-th step; `tensors` keeps whole tensors, for so many `steps`.
        """
        chosen = {"every": every, "tensors": tensors or None, "steps": steps, "off": off or None}
        options = {name: value for name, value in chosen.items() if value is not None}
        with RemoteSession(session or None) as opened:
            return _listed(offer("session.probe")(opened, pattern, **options), 0, 100)

    def _entries(self, *, sessions: bool = False) -> list[CatalogEntry]:
        """Return all entries; look for `sessions`, too, which takes a second if none listens."""
        known = {entry.where for entry in self._catalog.entries()}
        expected = [self._folder, str(parse_address(None)) if sessions else None]
        for each in (each for each in expected if each is not None and each not in known):
            with contextlib.suppress(TensortapError):  # there is none yet
                self._catalog.add(each)
        self._catalog.scan()
        return self._catalog.entries()

    def _entry(self, run: str) -> CatalogEntry:
        entries = self._entries()
        newest = [entry for entry in entries if isinstance(entry, RunEntry)] or entries
        if not run and not newest:
            raise NotFound("there is no run and no live session here")
        # a name of a folder with control characters is asked for as it was shown
        shown = {plain(each.id): each.id for each in entries}
        entry = self._catalog.get(shown.get(run, run) if run else newest[0].id)
        entry.refresh()
        return entry


def _described(entry: CatalogEntry) -> dict[str, Any]:
    found = describe_entry(entry)
    with contextlib.suppress(TensortapError):  # its state says that it has closed
        if isinstance(entry, SessionEntry):
            found["jobs"] = entry.overview().clients
    return _without(found, "version", "what")


def _without(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in keys}


def _names(table: Table, pattern: str = "") -> list[tuple[str, str]]:
    """Return names and kinds, in the order of names, without alerts."""
    matches = TypedPattern(pattern, ignore_case=True).search if pattern else bool
    with table.lock:
        pairs = [(name, kind) for kind in table.kinds for name in table.layers(kind)]
        order = {name: number for number, name in enumerate(table.names)}
    chosen = [pair for pair in pairs if pair[1] != Kind.ALERT and matches(pair[0] or " ")]
    return sorted(chosen, key=lambda pair: order[pair[0]])


def _listed(found: Any, offset: int, limit: int) -> str:
    is_list = isinstance(found, (list, tuple))
    return answer({}, found, offset, limit) if is_list else answer({"answer": found})
