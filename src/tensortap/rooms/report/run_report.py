"""The report of a run: one HTML file to mail, or to attach to a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.api.run_alerts import run_alerts
from tensortap.core.arguments import check_path, checked
from tensortap.core.files import CorruptFile, read_small
from tensortap.core.record import Kind
from tensortap.core.rooms import offers
from tensortap.rooms.figures.figures.exponents import exponents_figure
from tensortap.rooms.figures.figures.heatmap import heatmap_figure
from tensortap.rooms.figures.figures.lines import lines_figure
from tensortap.rooms.figures.figures.training import training_figure
from tensortap.rooms.report.html_file import (
    HtmlReport,
    details,
    escape,
    header,
    html_table,
    section,
    write_html_file,
)
from tensortap.runs.layout import read_json
from tensortap.runs.run_reader import RunReader
from tensortap.table.table import Table, table_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.alerts import Alert

Section = tuple[int, str]
"""A place, and the HTML there. Functions of a `RunReport` yield them: ``report.sections``."""

# bounds on what goes into the file
_MAX_ALERTS = 200
_MAX_DROPPED = 50
_MAX_PATCH = 200_000  # characters
_MAX_LAYERS = 6
_FORMAT = "float8_e4m3fn"  # whose losses are shown


@checked
def report(source: Any, path: str | Path) -> Path:
    """Write a report of a run, a live session, a tracker or a LogFrame into one HTML file.

    It shows training statistics, all layers over all steps, lines and exponents of the most
    notable layers, alerts, dropped records, and provenance.
    """
    check_path("path", path)
    return write_html_file(path, report_html(source))


def report_html(source: Any) -> str:
    made = RunReport(source)
    return made.page(made.title, "\n".join(made.parts()))


class RunReport(HtmlReport):
    """The sections of a report as HTML."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        source = RunReader(source) if isinstance(source, (str, Path)) else source
        self.table = table_of(source)
        reader: Any = getattr(source, "reader", source)
        self.reader = reader
        self.run = reader if isinstance(reader, RunReader) else None
        self.title = "tensortap report" if self.run is None else self.run.path.name
        self.alerts = run_alerts(self.table, reader)
        self.first_alert = self.alerts[0].step if self.alerts else None
        self.dropped = [] if self.run is None else self.run.missing()
        not_layers = (Kind.VALUE.value, Kind.LOCAL.value)
        self.kinds = [kind for kind in self.table.tensor_kinds() if kind not in not_layers]

    def parts(self) -> Iterator[str]:
        """Yield the HTML of the page, from top to bottom."""
        yield self._header()
        yield "<main>"
        sections = [*self._sections()]
        for sections_of in offers("report.sections"):
            sections += sections_of(self)
        yield from (text for _, text in sorted(sections, key=lambda each: each[0]))
        yield "</main>"

    def _sections(self) -> Iterator[Section]:
        if self.alerts:
            yield 20, self._first_alert(self.alerts[0])
            yield 90, self._alerts()
        if self.table.metrics():
            yield 40, self._training()
        yield 50, self._overview()
        if self.kinds:
            yield 60, self._notable()
        if self.run is not None:
            yield 100, self._dropped(self.run)
            yield 110, self._provenance(self.run)

    # -- header --------------------------------------------------------------------------

    def _header(self) -> str:
        table = self.table
        bad = sum(int((table.nonfinite(table.rows(kind=k)) > 0).sum()) for k in self.kinds)
        counts = [
            ("records", len(table)),
            ("steps", sum(step >= 0 for step in table.steps())),
            ("names", len(table.names)),
            ("ranks", len(table.ranks())),
            ("alerts", len(self.alerts)),
            ("tensors with NaN or Inf", bad),
            ("dropped records", len(self.dropped)),
        ]
        css, verdict = "agree", "No alerts"
        if not len(table):
            css, verdict = "", "Empty run"
        elif self.alerts or bad:
            css, verdict = "differ", _plural(len(self.alerts), "alert") or "NaN or Inf"
        return header(verdict, css, self._origin(), counts)

    def _origin(self) -> Iterator[tuple[str, str]]:
        """Yield what the report is about: labels and texts."""
        if self.run is None:
            yield "source", "a live session, a tracker or a LogFrame"
            return
        yield "run", str(self.run.where)
        command = value_at(self._json("runtime_info.json"), "command", "full_command")
        if command:
            yield "command", str(command)
        info = self.run.info
        ended = "now, or until it was killed" if info.ended is None else _time(info.ended)
        yield "time", f"{_time(info.started)} to {ended} ({info.time_zone})"

    def _json(self, name: str) -> dict[str, Any]:
        content = read_json(self.run.path, name) if self.run is not None else None
        return content if isinstance(content, dict) else {}

    # -- figures -------------------------------------------------------------------------

    def _first_alert(self, alert: Alert) -> str:
        rank = f" · rank {alert.rank}" if len(self.table.ranks()) > 1 else ""
        return (
            f'<section id="first"><h2>First alert</h2><div class="name">{escape(alert.name)}</div>'
            f'<div class="dim">{alert.kind.value} · step {alert.step:,}{rank}</div>'
            f"<p>{escape(_alert_text(alert))}</p></section>"
        )

    def _training(self) -> str:
        figure = training_figure(self.table, height=220, step=self.first_alert)
        note = "" if self.first_alert is None else "The dotted line marks the first alert."
        return section("Training", self.figure(figure, "training statistics"), note)

    def _overview(self) -> str:
        if not self.kinds:
            state = "has no statistics" if len(self.table) else "is empty"
            return section("Overview", f"<p>This run {state}. tap.track() records statistics.</p>")
        metric = "rm2" if self.table.has("rm2") else self.table.statistics()[0]
        tabs = {}
        for kind in self.kinds:
            figure = heatmap_figure(self.table, kind=kind, metric=metric, alerts=self.alerts)
            tabs[kind] = self.figure(figure, f"{metric} of {kind} by layer and step")
        note = (
            f"{metric} of every layer at every step. NaN and Inf have their own colors. "
            "Triangles mark alerts."
        )
        return section("Overview", _tabs(tabs), note)

    def _notable(self) -> str:
        tabs = {}
        metrics = [m for m in ("rm2", "max_abs", "min_abs") if self.table.has(m)]
        metrics = metrics or self.table.statistics()[:2]
        for kind in self.kinds:
            names = notable_layers(self.table, kind, self.alerts, _MAX_LAYERS)
            lines = lines_figure(
                self.table, names=names, kind=kind, metrics=metrics, step=self.first_alert,
                panels="metric",
            )  # fmt: skip
            tabs[kind] = self.figure(lines, f"statistics of {kind} over steps")
            step = last_finite_step(self.table, kind, names, self.first_alert)
            if step is not None:
                bars = exponents_figure(
                    self.table, name=names, kind=kind, step=step, dtype_annotation=_FORMAT
                )
                title = f"Exponents at step {step:,}, and losses in {_FORMAT}"
                tabs[kind] += f"<h3>{title}</h3>" + self.figure(bars, title)
        note = "Layers with alerts come first, then the layers that changed most."
        return section("Most notable layers", _tabs(tabs), note)

    # -- tables --------------------------------------------------------------------------

    def _alerts(self) -> str:
        rows = [
            [f"{a.step:,}", a.rank, a.name, a.kind.value, a.rule, _alert_text(a)]
            for a in self.alerts[:_MAX_ALERTS]
        ]
        heads = ["step", "rank", "name", "kind", "rule", "message"]
        note = f"The first {_MAX_ALERTS} of {len(self.alerts):,}."
        table = f'<div class="tall">{html_table(rows, heads, numbers=(0, 1))}</div>'
        return section("Alerts", table, note if len(self.alerts) > _MAX_ALERTS else "")

    def _dropped(self, run: RunReader) -> str:
        content = "".join(
            f"<p>Rank {rank}: the last write was interrupted; {nbytes:,} bytes are unreadable.</p>"
            for rank, nbytes in run.truncated.items()
        )
        if self.dropped:
            rows = [[name, f"{step:,}", rank] for name, step, rank in self.dropped[:_MAX_DROPPED]]
            more = len(self.dropped) > _MAX_DROPPED
            listed = f" The first {_MAX_DROPPED} are listed." if more else ""
            content += f"<p>{_plural(len(self.dropped), 'record')} dropped over budget.{listed}</p>"
            content += html_table(rows, ["name", "step", "rank"], numbers=(1, 2))
        return section("Dropped records", content) if content else ""

    def _provenance(self, run: RunReader) -> str:
        runtime, packages = self._json("runtime_info.json"), self._json("packages.json")
        git = self._json("git_info.json")
        if not (runtime or packages or git):
            return section("Provenance", "<p>This run has no provenance. tap.init() writes it.</p>")
        host = value_at(runtime, "host")
        if isinstance(host, dict):
            host = ", ".join(f"{key} {text}" for key, text in host.items() if text)
        facts = {
            "command": value_at(runtime, "command", "full_command"),
            "folder": value_at(runtime, "working_directory"),
            "host": host,
            "Python": packages.get("python_version"),
            "platform": packages.get("platform"),
            "commit": value_at(git, "project_git_info", "commit_id"),
            "branch": value_at(git, "project_git_info", "branch"),
            "state": value_at(git, "project_git_info", "status"),
            "world size": run.info.world_size,
        }
        content = html_table([key, text] for key, text in facts.items() if text)
        patch = read_patch(run.path)
        if patch:
            files = sum(line.startswith("diff --git") for line in patch.splitlines())
            text = f'<pre class="patch">{escape(patch, _MAX_PATCH)}</pre>'
            content += details(f"project.patch: {_plural(files, 'changed file')}", text)
        for title, found in (
            ("Functions replaced at run time", git.get("runtime_modifications")),
            ("Packages", packages.get("all_packages")),
        ):
            if isinstance(found, dict) and found:
                rows = ([name, str(text)[:300]] for name, text in found.items())
                content += details(f"{title}: {len(found):,}", html_table(rows))
        content += f"<h3>Run it again</h3><pre>tensortap reproduce {escape(run.where)}</pre>"
        return section("Provenance", content)


def _tabs(tabs: dict[str, str]) -> str:
    """Return one pane per kind, of which the page shows one at a time."""
    if len(tabs) == 1:
        return next(iter(tabs.values()))
    buttons = "".join(
        f'<button type="button" aria-pressed="{"false" if i else "true"}">{kind}</button>'
        for i, kind in enumerate(tabs)
    )
    panes = "".join(
        f'<div class="pane"{" hidden" if i else ""}>{content}</div>'
        for i, content in enumerate(tabs.values())
    )
    bar = f'<div class="bar" role="group" aria-label="kind of tensor">{buttons}</div>'
    return f'<div class="tabs">{bar}{panes}</div>'


def _plural(count: int, word: str) -> str:
    """
    >>> _plural(0, "alert"), _plural(1, "alert"), _plural(2000, "alert")
    ('', '1 alert', '2,000 alerts')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}" if count else ""


def _alert_text(alert: Alert) -> str:
    text = alert.message
    if alert.origin and alert.origin != alert.module:
        text += f" (from {alert.origin})"
    return f"{text}; {alert.again:,} more times" if alert.again else text


def value_at(content: Any, *keys: str) -> Any:
    """Return what nested dicts hold under some keys; None if there is nothing."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def read_patch(run: Path) -> str:
    """Return the uncommitted changes that a run stored, at most 64 MiB."""
    try:
        return read_small(run, "project.patch", 64 << 20).decode("utf-8", "replace")
    except (OSError, CorruptFile):
        return ""


def _time(text: str) -> str:
    return text[:19].replace("T", " ")


def notable_layers(table: Table, kind: str, alerts: Sequence[Alert], most: int) -> list[str]:
    """Return the layers with alerts, then those with NaN or Inf, then those that changed most."""
    first_alert: dict[str, int] = {}
    for number, alert in enumerate(alerts):
        if alert.kind.value == kind:
            first_alert.setdefault(alert.name, number)
    sizes = table.column("rm2") if table.has("rm2") else np.full(len(table), np.nan)
    ranked = []
    for position, name in enumerate(table.layers(kind)):
        rows = table.series(kind, name)
        finite = not table.nonfinite(rows).any()
        key = first_alert.get(name, len(alerts)), finite, -_decades(sizes[rows])
        ranked.append((key, position, name))
    chosen = sorted(ranked)[:most]
    return [name for _, _, name in sorted(chosen, key=lambda layer: layer[1])]


def _decades(values: NDArray[np.float64]) -> float:
    """Return how many powers of ten lie between the smallest and the largest value."""
    good = values[np.isfinite(values) & (values > 0)]
    return float(np.log10(good.max() / good.min())) if len(good) else 0.0


def last_finite_step(
    table: Table, kind: str, names: Sequence[str], before: int | None
) -> int | None:
    """Return the last step at which all of these layers are finite, if possible up to `before`."""
    each: list[set[int]] = []
    for name in names:
        rows = table.series(kind, name)
        each.append(set(table.step[rows[table.nonfinite(rows) == 0]].tolist()))
    steps = sorted(set.intersection(*each)) if each else []
    early = [step for step in steps if before is not None and step <= before]
    found = early or steps
    return found[-1] if found else None
