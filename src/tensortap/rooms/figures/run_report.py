"""The report of a run: one HTML file to mail, or to attach to a pull request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.api.run_alerts import run_alerts
from tensortap.core.arguments import check_path, checked
from tensortap.core.files import CorruptFile, read_small
from tensortap.core.record import Kind
from tensortap.core.rooms import offers
from tensortap.page.encoding import share
from tensortap.rooms.figures.figures import (
    exponents_figure,
    heatmap_figure,
    lines_figure,
    training_figure,
)
from tensortap.rooms.figures.html_file import (
    HtmlReport,
    count_cards,
    details,
    escape,
    header,
    html_table,
    section,
    write_html_file,
)
from tensortap.rooms.figures.notable import (
    FORMATS,
    largest_losses,
    last_finite_step,
    notable_layers,
)
from tensortap.runs.layout import read_json
from tensortap.runs.run_reader import RunReader
from tensortap.table.table import table_of

if TYPE_CHECKING:
    from tensortap.alerts import Alert

Section = tuple[int, str]
"""A place, and the HTML there. Functions of a `RunReport` yield them: ``report.sections``."""

# bounds on what goes into the file
_MAX_ALERTS = 200
_MAX_DROPPED = 50
_MAX_PATCH = 200_000  # characters
_MAX_PATCHES = 20
_LARGEST_PATCH = 64 << 20  # bytes
_MAX_LAYERS = 6
_MAX_CHANGES = 50
_ROWS, _COLUMNS = 200, 320  # cells of an overview
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@checked
def report(source: Any, path: str | Path) -> Path:
    """Write a report of a run, a live session, a tracker or a LogFrame into one HTML file.

    It shows training statistics, all layers over all steps, lines and exponents of the most
    notable layers, losses in low precision, alerts, dropped records, and provenance.
    """
    check_path("path", path)
    return write_html_file(path, report_html(source))


def report_html(source: Any) -> str:
    """Return the report as text."""
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
        yield 80, self._losses()
        if self.run is not None:
            yield 100, self._dropped(self.run)
            yield 110, self._provenance(self.run)

    # -- header --------------------------------------------------------------------------

    def _header(self) -> str:
        table = self.table
        bad = sum(int((table.nonfinite(table.rows(kind=k)) > 0).sum()) for k in self.kinds)
        counts = [
            ("records", len(table), ""),
            ("steps", sum(step >= 0 for step in table.steps()), ""),
            ("names", len(table.names), ""),
            ("ranks", len(table.ranks()), ""),
            ("alerts", len(self.alerts), "bad" if self.alerts else ""),
            ("tensors with NaN or Inf", bad, "bad" if bad else ""),
        ]
        if self.dropped:
            counts.append(("dropped records", len(self.dropped), "warn"))
        css, verdict = "agree", "No alerts"
        if not len(table):
            css, verdict = "", "Empty run"
        elif self.alerts or bad:
            css, verdict = "differ", _plural(len(self.alerts), "alert") or "NaN or Inf"
        return header(verdict, css, self._origin(), count_cards(counts))

    def _origin(self) -> Iterator[tuple[str, str]]:
        """Yield what the report is about: labels and texts."""
        if self.run is None:
            yield "source", "a live session, a tracker or a LogFrame"
            return
        yield "run", str(self.run.where)
        command = _value_at(self._json("runtime_info.json"), "command", "full_command")
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
        origin = f'<div class="why">from {escape(alert.origin)}</div>' if alert.origin else ""
        return (
            f'<section id="first"><h2>First alert</h2><div class="name">{escape(alert.name)}</div>'
            f'<div class="dim">{alert.kind.value} · step {alert.step:,}{rank}</div>'
            f"<p>{escape(alert.message)}</p>{origin}</section>"
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
            figure = heatmap_figure(
                self.table, kind=kind, metric=metric, alerts=self.alerts, rows=_ROWS,
                columns=_COLUMNS,
            )  # fmt: skip
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
                    self.table, name=names, kind=kind, step=step, dtype_annotation=FORMATS[0]
                )
                title = f"Exponents at step {step:,}, and losses in {FORMATS[0]}"
                tabs[kind] += f"<h3>{title}</h3>" + self.figure(bars, title)
        note = "Layers with alerts come first, then the layers that changed most."
        return section("Most notable layers", _tabs(tabs), note)

    # -- tables --------------------------------------------------------------------------

    def _losses(self) -> str:
        rows = []
        for tensor in largest_losses(self.table):
            first = tensor.losses[FORMATS[0]]
            lost = [_loss_text(tensor.losses[dtype]) for dtype in FORMATS]
            scale = f"2{str(int(first['shift'])).translate(_SUPERSCRIPT)}"
            rows.append(
                [tensor.name, tensor.kind, f"{tensor.step:,}", *lost, scale, share(first["scaled"])]
            )
        if not rows:
            return ""
        heads = ["tensor", "kind", "step", *FORMATS, f"best scale for {FORMATS[0]}", "loss then"]
        note = (
            "Shares of the nonzero finite values that underflow (↓) or overflow (↑), at the last "
            "step at which the tensor was finite."
        )
        return section(
            "Losses in low precision", html_table(rows, heads, numbers=range(2, 8)), note
        )

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
        project = _value_at(git, "project_git_info")
        host = _value_at(runtime, "host")
        if isinstance(host, dict):
            host = ", ".join(f"{key} {text}" for key, text in host.items() if text)
        facts = {
            "command": _value_at(runtime, "command", "full_command"),
            "folder": _value_at(runtime, "working_directory")
            or _value_at(runtime, "command", "cwd"),
            "host": host,
            "Python": _value_at(packages, "python_version"),
            "platform": _value_at(packages, "platform"),
            "commit": _value_at(project, "commit_id"),
            "branch": _value_at(project, "branch"),
            "state": _value_at(project, "status"),
            "world size": run.info.world_size,
        }
        content = html_table([key, text] for key, text in facts.items() if text)
        changes = "".join(_changes(run, git.get("runtime_modifications")))
        content += f"<h3>Changes</h3>{changes}" if changes else ""
        versions = packages.get("all_packages")
        if isinstance(versions, dict) and versions:
            table = html_table(versions.items(), ["package", "version"])
            content += details(_plural(len(versions), "package"), table)
        content += f"<h3>Run it again</h3><pre>tensortap reproduce {escape(run.where)}</pre>"
        return section("Provenance", content)


def _changes(run: RunReader, replaced: Any) -> Iterator[str]:
    """Yield the patches of the repository, and the functions that were replaced at run time."""
    for path in sorted(run.path.glob("*.patch"))[:_MAX_PATCHES]:
        try:
            patch = read_small(run.path, path.name, _LARGEST_PATCH).decode("utf-8", "replace")
        except (OSError, CorruptFile):
            continue
        files = sum(line.startswith("diff --git") for line in patch.splitlines())
        text = f'<pre class="patch">{escape(patch, _MAX_PATCH)}</pre>'
        yield details(f"{path.name}: {_plural(files, 'changed file')}", text)
    if isinstance(replaced, dict) and replaced:
        rows = [
            [name, json.dumps(how)[:300]] for name, how in list(replaced.items())[:_MAX_CHANGES]
        ]
        yield details("Functions replaced at run time", html_table(rows))


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


def _loss_text(losses: dict[str, float]) -> str:
    both = (("↓", losses["underflow"]), ("↑", losses["overflow"]))
    return "  ".join(f"{arrow} {share(part)}" for arrow, part in both if part) or "none"


def _alert_text(alert: Alert) -> str:
    text = alert.message
    if alert.origin and alert.origin != alert.module:
        text += f" (from {alert.origin})"
    return f"{text}; {alert.again:,} more times" if alert.again else text


def _value_at(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _time(text: str) -> str:
    return text[:19].replace("T", " ")
