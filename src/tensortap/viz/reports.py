"""A run as one HTML file that needs nothing else: to mail, or to attach to a pull request."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap._version import __version__
from tensortap.errors import MissingExtra
from tensortap.readers.run import RunReader, read_json
from tensortap.record import Kind
from tensortap.table.table import Table, table_of
from tensortap.viz.figures import exponents_figure, heatmap_figure, lines_figure, training_figure
from tensortap.viz.figures.theme import Figure, recoloured, share
from tensortap.viz.notable import FORMATS, losses_table, notable, telling_step
from tensortap.viz.page import as_data, static, write_page

if TYPE_CHECKING:
    from tensortap.alerts import Alert

_ALERTS = 200
_MISSING = 50
_PATCH = 200_000  # characters
_LAYERS = 6
_ROWS, _COLUMNS = 200, 320  # cells of an overview
_FOOTER = f"<footer>Written by tensortap {__version__}. Nothing is fetched by this file.</footer>"
_KINDS = (Kind.ACTIVATION.value, Kind.GRADIENT.value, Kind.WEIGHT.value,
          Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value)  # fmt: skip


def report(source: Any, path: str | Path) -> Path:
    """Write what is to be seen of a run, a live session or a LogFrame into one file.

    The overview of layers by steps, the lines and exponents of the most notable layers, alerts,
    training statistics, what is missing, and what ran.
    """
    return write_page(path, render(source))


def render(source: Any) -> str:
    """The page."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtra("a report needs plotly: pip install 'tensortap[view]'") from None
    found = Report(source)
    body = found.body()
    page = static("tensortap.viz", "report.html")
    parts = {
        "style": static("tensortap.viz", "look.css") + static("tensortap.viz", "report.css"),
        "plotly": get_plotlyjs(),
        "script": static("tensortap.viz", "report.js"),
        "data": as_data({"figures": found.figures, "colours": recoloured()}),
        "title": _text(found.title),
        "body": body,
    }
    # in one go: what one part says is never taken for the place of another
    pieces = page.split("/*|*/")
    return "".join(parts.get(piece.strip(), piece) for piece in pieces)


class Report:
    """The sections of a report; `figures` are those that they refer to."""

    def __init__(self, source: Any) -> None:
        source = RunReader(source) if isinstance(source, (str, Path)) else source
        self.table: Table = table_of(source)
        reader = getattr(source, "reader", source)
        self.run = reader if isinstance(reader, RunReader) else None
        self.alerts = self.table.alerts()
        self.figures: dict[str, Figure] = {}
        self.kinds = [kind for kind in _KINDS if kind in self.table.tensor_kinds()]
        self.title = self.run.path.name if self.run is not None else "tensortap report"

    def body(self) -> str:
        sections = [
            self._head(),
            "<main>",
            self._first(),
            self._training(),
            self._overview(),
            self._notable(),
            self._formats(),
            self._alerts(),
            self._missing(),
            self._provenance(),
            "</main>",
            _FOOTER,
        ]
        return "\n".join(sections)

    # -- head ----------------------------------------------------------------------------

    def _head(self) -> str:
        table = self.table
        bad = sum(int((table.nonfinite(table.rows(kind=k)) > 0).sum()) for k in self.kinds)
        steps = table.steps()
        counts: list[tuple[str, str, str]] = [
            ("records", f"{len(table):,}", ""),
            ("steps", f"{len(steps):,}", ""),
            ("names", f"{len(table.names):,}", ""),
            ("ranks", f"{len(table.ranks()):,}", ""),
            ("alerts", f"{len(self.alerts):,}", "bad" if self.alerts else ""),
            ("tensors not finite", f"{bad:,}", "bad" if bad else ""),
        ]
        gone = len(self.run.missing()) if self.run is not None else 0
        if gone:
            counts.append(("missing", f"{gone:,}", "warn"))
        cells = "".join(
            f'<div class="{kind}"><dt>{_text(name)}</dt><dd>{said}</dd></div>'
            for name, said, kind in counts
        )
        verdict, word = self._verdict(bad)
        lines = "".join(
            f'<span class="dim">{_text(key)}</span><span class="mono">{_text(said)}</span>'
            for key, said in self._about()
        )
        return (
            f'<header><div id="verdict" class="{verdict}">{_text(word)}</div>'
            f'<div id="sides">{lines}</div><dl id="counts">{cells}</dl></header>'
        )

    def _verdict(self, bad: int) -> tuple[str, str]:
        if not len(self.table):
            return "", "an empty run"
        if self.alerts or bad:
            count = len(self.alerts)
            return (
                "differ",
                f"{count:,} alert{'' if count == 1 else 's'}" if count else "not finite",
            )
        return "agree", "no alerts"

    def _about(self) -> Iterable[tuple[str, str]]:
        if self.run is None:
            yield "source", "a live session, a tracker or a LogFrame"
            return
        info = self.run.info
        yield "run", str(self.run.where)
        command = _at(self._json("runtime_info.json"), "command", "full_command")
        if command:
            yield "command", str(command)
        ended = info.ended or "not yet: still running, or cut off"
        yield "time", f"{_moment(info.started)} to {_moment(ended)} ({info.time_zone})"

    def _json(self, name: str) -> dict[str, Any]:
        found = read_json(self.run.path / name) if self.run is not None else None
        return found if isinstance(found, dict) else {}

    # -- figures -------------------------------------------------------------------------

    def _figure(self, figure: Figure, label: str) -> str:
        key = f"figure{len(self.figures)}"
        self.figures[key] = figure
        height = int(figure["layout"].get("height", 300))
        return (
            f'<div class="figure" id="{key}" role="img" aria-label="{_text(label)}" '
            f'style="height:{height}px"></div>'
        )

    def _section(self, title: str, content: str, words: str = "") -> str:
        said = f'<p class="dim">{words}</p>' if words else ""
        return f"<section><h2>{_text(title)}</h2>{said}{content}</section>"

    def _tabs(self, tabs: Sequence[tuple[str, str]], label: str) -> str:
        """Contents of which one is seen; without JavaScript all are."""
        if len(tabs) == 1:
            return tabs[0][1]
        buttons = "".join(
            f'<button type="button" aria-pressed="{str(not i).lower()}">{_text(name)}</button>'
            for i, (name, _) in enumerate(tabs)
        )
        panes = "".join(
            f'<div class="pane"{" hidden" if i else ""}>{content}</div>'
            for i, (_, content) in enumerate(tabs)
        )
        return (
            f'<div class="tabs"><div class="bar" role="group" aria-label="{_text(label)}">'
            f"{buttons}</div>{panes}</div>"
        )

    def _first(self) -> str:
        if not self.alerts:
            return ""
        alert = self.alerts[0]
        rank = f" · rank {alert.rank}" if len(self.table.ranks()) > 1 else ""
        origin = f'<div class="why">from {_text(alert.origin)}</div>' if alert.origin else ""
        return (
            f'<section id="first"><h2>The first alert</h2><div class="name">{_text(alert.name)}'
            f'</div><div class="dim">{_text(alert.kind.value)} · step {alert.step:,}{rank}</div>'
            f"<p>{_text(alert.message)}</p>{origin}</section>"
        )

    def _training(self) -> str:
        if not self.table.training():
            return ""
        step = self.alerts[0].step if self.alerts else None
        figure = training_figure(self.table, height=220, step=step)
        words = "The dotted line is the step of the first alert." if step is not None else ""
        return self._section("Training", self._figure(figure, "training statistics"), words)

    def _overview(self) -> str:
        if not self.kinds:
            what = "holds no statistics" if len(self.table) else "is empty"
            return self._section("Overview", f"<p>This run {what}: tap.track() takes them.</p>")
        metric = "rm2" if self.table.has("rm2") else self.table.statistics()[0]
        tabs = []
        for kind in self.kinds:
            figure = heatmap_figure(
                self.table,
                kind=kind,
                metric=metric,
                alerts=self.alerts,
                rows=_ROWS,
                columns=_COLUMNS,
            )
            tabs.append((kind, self._figure(figure, f"{metric} of {kind} by layers and steps")))
        words = (
            f"{_text(metric)} of every layer at every step; what is not finite has a colour of its "
            "own, triangles are alerts."
        )
        return self._section("Overview", self._tabs(tabs, "kind of tensor"), words)

    def _notable(self) -> str:
        tabs = []
        before = self.alerts[0].step if self.alerts else None
        wanted = [m for m in ("rm2", "max_abs", "min_abs") if self.table.has(m)]
        wanted = wanted or self.table.statistics()[:2]
        for kind in self.kinds:
            names = notable(self.table, kind, self.alerts, _LAYERS)
            lines = lines_figure(
                self.table, names=names, kind=kind, metrics=wanted, step=before, panels="metric"
            )
            content = self._figure(lines, f"statistics of {kind} over steps")
            step = telling_step(self.table, kind, names, before)
            if step is not None:
                bars = exponents_figure(
                    self.table, name=names, kind=kind, step=step, dtype_annotation=FORMATS[0]
                )
                title = f"Exponents at step {step:,}, and what {FORMATS[0]} would lose"
                content += f"<h3>{_text(title)}</h3>" + self._figure(bars, title)
            tabs.append((kind, content))
        if not tabs:
            return ""
        words = "Those with alerts first, then those that changed most."
        return self._section("The most notable layers", self._tabs(tabs, "kind of tensor"), words)

    # -- tables --------------------------------------------------------------------------

    def _formats(self) -> str:
        found = losses_table(self.table)
        if not found:
            return ""
        heads = ["tensor", "kind", "step", *FORMATS, f"best scale for {FORMATS[0]}", "lost then"]
        rows = []
        for each in found:
            first = each.columns[FORMATS[0]]
            lost = [_lost(each.columns[dtype]) for dtype in FORMATS]
            scale = f"2{str(int(first['shift'])).translate(_RAISED)}"
            rows.append(
                [each.name, each.kind, f"{each.step:,}", *lost, scale, share(first["scaled"])]
            )
        words = (
            "Shares of the nonzero finite values (↓ underflow, ↑ overflow), at the last step at "
            "which a tensor was finite."
        )
        return self._section(
            "What low precision would lose", _table(heads, rows, right=range(2, 8)), words
        )

    def _alerts(self) -> str:
        if not self.alerts:
            return ""
        rows = [
            [f"{a.step:,}", str(a.rank), a.name, a.kind.value, a.rule, _again(a)]
            for a in self.alerts[:_ALERTS]
        ]
        more = len(self.alerts) - _ALERTS
        words = f"The first {_ALERTS} of {len(self.alerts):,}." if more > 0 else ""
        heads = ["step", "rank", "name", "kind", "rule", "what"]
        return self._section(
            "Alerts", f'<div class="tall">{_table(heads, rows, right=(0, 1))}</div>', words
        )

    def _missing(self) -> str:
        if self.run is None:
            return ""
        lines = [
            f"Rank {rank}: {nbytes:,} bytes at the end were cut off in mid-write."
            for rank, nbytes in self.run.cut.items()
        ]
        gone = self.run.missing()
        if not gone and not lines:
            return ""
        content = "".join(f"<p>{_text(line)}</p>" for line in lines)
        if gone:
            rows = [[name, f"{step:,}", str(rank)] for name, step, rank in gone[:_MISSING]]
            more = f" The first {_MISSING} are listed." if len(gone) > _MISSING else ""
            content += (
                f"<p>{len(gone):,} values found no room when they were captured.{more}</p>"
                + _table(["name", "step", "rank"], rows, right=(1, 2))
            )
        return self._section("What is missing", content)

    def _provenance(self) -> str:
        if self.run is None:
            return ""
        runtime, packages = self._json("runtime_info.json"), self._json("packages.json")
        git = self._json("git_info.json")
        if not (runtime or packages or git):
            words = "<p>This run has no provenance: tap.init() writes it.</p>"
            return self._section("What ran", words)
        project = _at(git, "project_git_info")
        rows = [
            ["command", _at(runtime, "command", "full_command")],
            ["folder", _at(runtime, "working_directory") or _at(runtime, "command", "cwd")],
            ["host", _words(_at(runtime, "host"))],
            ["Python", _at(packages, "python_version")],
            ["platform", _at(packages, "platform")],
            ["commit", _at(project, "commit_id")],
            ["branch", _at(project, "branch")],
            ["state", _at(project, "status")],
            ["world size", self.run.info.world_size],
        ]
        shown = [[key, str(said)] for key, said in rows if said]
        content = _table(["", ""], shown, head=False)
        content += self._changed(git) + _packages(packages)
        command = f"tensortap reproduce {self.run.where}"
        content += f"<h3>To run it again</h3><pre>{_text(command)}</pre>"
        return self._section("What ran", content)

    def _changed(self, git: dict[str, Any]) -> str:
        assert self.run is not None
        found = ""
        for path in sorted(self.run.path.glob("*.patch")):
            try:
                patch = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            files = sum(line.startswith("diff --git") for line in patch.splitlines())
            cut = "\n… (cut off here)" if len(patch) > _PATCH else ""
            found += (
                f"<details><summary>{_text(path.name)}: {files} changed "
                f'file{"" if files == 1 else "s"}</summary><pre class="patch">'
                f"{_text(patch[:_PATCH] + cut)}</pre></details>"
            )
        changes = git.get("runtime_modifications")
        if isinstance(changes, dict) and changes:
            rows = [
                [str(name), json.dumps(what)[:300]] for name, what in list(changes.items())[:50]
            ]
            found += (
                "<details><summary>Functions that were replaced while it ran</summary>"
                + _table(["", ""], rows, head=False)
                + "</details>"
            )
        return f"<h3>What was changed</h3>{found}" if found else ""


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _lost(column: dict[str, float]) -> str:
    """What underflows and overflows, for certain."""
    both = (("↓", column["underflow"]), ("↑", column["overflow"]))
    return "  ".join(f"{mark} {share(part)}" for mark, part in both if part) or "nothing"


def _packages(packages: dict[str, Any]) -> str:
    found = packages.get("all_packages")
    if not isinstance(found, dict) or not found:
        return ""
    rows = [[str(name), str(version)] for name, version in found.items()]
    return (
        f"<details><summary>{len(rows)} packages</summary>"
        + _table(["package", "version"], rows)
        + "</details>"
    )


def _again(alert: Alert) -> str:
    said = alert.message
    if alert.origin and alert.origin != alert.module:
        said += f" (from {alert.origin})"
    return f"{said}; {alert.again:,} times more" if alert.again else said


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[int] = (),
    head: bool = True,
) -> str:
    """A table of texts; numbers stand on the right."""
    numbers = set(right)
    kind: Callable[[int], str] = lambda i: ' class="n"' if i in numbers else ' class="mono"'  # noqa: E731
    above = "".join(
        f"<th{' class=n' if i in numbers else ''}>{_text(h)}</th>" for i, h in enumerate(heads)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind(i)}>{_text(c)}</td>" for i, c in enumerate(row)) + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{above}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _text(words: object, most: int = _PATCH + 100) -> str:
    """Any text as text: escaped, and nothing that a file cannot hold."""
    said = str(words).encode("utf-8", "replace").decode("utf-8")
    return html.escape(said if len(said) <= most else f"{said[:most]}…")


def _at(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {said}" for key, said in value.items() if said)
    return "" if value is None else str(value)


def _moment(text: str) -> str:
    return text[:19].replace("T", " ") if text[:2].isdigit() else text
