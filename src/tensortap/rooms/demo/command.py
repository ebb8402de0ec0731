"""`tensortap demo`: train, track, watch live, compare, alert, film and report, in a minute."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from tensortap.core.errors import MissingExtra, TensortapError
from tensortap.core.record import Kind, Record

if TYPE_CHECKING:
    from rich.console import Console

    from tensortap.live.answers import Overview
    from tensortap.live.server import Server
    from tensortap.rooms.compare.report import CompareReport

STEPS = 200
_LIMIT = 120.0


def demo(
    steps: int = typer.Option(STEPS, min=20, max=5000, help="Training steps."),
    folder: Path | None = typer.Option(None, help="Folder for the runs. Default: a new one."),
    view: bool | None = typer.Option(
        None,
        "--view/--no-view",
        help="Keep running with a page of the two runs. Default: in a terminal.",
    ),
) -> None:
    """Train a small transformer twice, once with bugs, and find the bugs with tensortap."""
    from rich.console import Console

    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("the demo trains a model of torch: pip install torch")
    console = Console(highlight=False, markup=False)
    target = folder or Path(tempfile.mkdtemp(prefix="tensortap-demo-"))
    target.mkdir(parents=True, exist_ok=True)
    bug = steps // 2 // 5 * 5  # every fifth step is tracked
    with _own_key():
        good, cost = _watched(console, steps, target / "runs")
        console.rule(f"the same training again; one layer loses digits from step {bug}")
        bad, _ = _result(_train(steps, target / "runs", bug, "127.0.0.1:9"))  # nobody listens there
    found = _compare(console, good, bad)
    _alerts(console, bad)
    films = _film(console, good, target / "film.mp4")
    reports = _reports(console, found, good, target)
    pages = [*reports, *films]
    console.rule("tap.receipt(): what it cost the first training")
    console.print(cost, soft_wrap=True)
    _print_next_steps(console, good, bad, pages)
    if view or (view is None and console.is_terminal and reports):
        from tensortap.cli.view import show_page

        console.rule("tap.view(): the two runs in the browser")
        show_page(str(target / "runs"))


@contextlib.contextmanager
def _own_key() -> Iterator[None]:
    """Use a key of the demo's own."""
    before = {name: os.environ.pop(name, None) for name in ("TENSORTAP_KEY", "XDG_CONFIG_HOME")}
    with tempfile.TemporaryDirectory(prefix="tensortap-demo-key-") as own:
        os.environ["XDG_CONFIG_HOME"] = own
        try:
            yield
        finally:
            del os.environ["XDG_CONFIG_HOME"]
            os.environ.update({name: text for name, text in before.items() if text is not None})


def _train(steps: int, runs: Path, bug: int, server: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("demo_train.py")
    # one thread: sums over several threads are not reproducible
    env = dict(os.environ, TENSORTAP_SERVER=server, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    env.pop("TENSORTAP_DISABLE", None)
    command = [sys.executable, str(script), str(steps), str(runs), str(bug)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _result(trainer: subprocess.Popen[str]) -> tuple[Path, str]:
    """Return the run that the training program wrote, and its receipt."""
    try:
        output, _ = trainer.communicate(timeout=_LIMIT)
    finally:
        trainer.kill()
    if trainer.returncode:
        raise TensortapError(f"the training program exited with {trainer.returncode}")
    path, _, receipt = output.partition("\n")
    return Path(path), receipt.strip()


def _watched(console: Console, steps: int, runs: Path) -> tuple[Path, str]:
    """Watch a training program live; return its run and its receipt."""
    from tensortap.api import session as live
    from tensortap.api import tables
    from tensortap.live import answers

    server = live.start("127.0.0.1", 0, "512MB")
    try:
        console.rule("a live session in this process, a training program in another")
        trainer = _train(steps, runs, -1, str(server.address))
        _follow(console, server, trainer)
        run, receipt = _result(trainer)
        console.rule("tap.summary(): some of what has arrived")
        console.print(tables.summary(_part(answers.overview(server))))
        _use(console, server)
    finally:
        server.close()
    return run, receipt


def _part(whole: Overview) -> Overview:
    """Return the overview with few enough names for a first look."""

    def is_shown(head: Record) -> bool:
        whole_blocks = head.kind in (Kind.ACTIVATION, Kind.GRADIENT) and head.name.count(".") < 2
        return whole_blocks or head.kind in (Kind.VALUE, Kind.METRIC)

    names = tuple(row for row in whole.names if is_shown(row.head))
    return msgspec.structs.replace(whole, names=names, recent=())


def _follow(console: Console, server: Server, trainer: subprocess.Popen[str]) -> None:
    """Print losses as they arrive."""
    from tensortap.api import lookup
    from tensortap.text.tensors import number

    history = server.history
    end = time.monotonic() + _LIMIT
    seen = 0
    while time.monotonic() < end:
        losses = history.records("loss")
        for record in losses[seen:]:
            if record.step % 10 == 0:
                value = float(lookup.get(history, "loss", step=record.step))
                bar = "█" * int(min(value, 3.0) * 32)
                console.print(f"step {record.step:4d}  loss {number(value):>7}  {bar}")
        seen = len(losses)
        if trainer.poll() is not None:
            break
        history.wait(history.written + 1, 0.2)


def _use(console: Console, server: Server) -> None:
    """Get a tensor from the session and use it."""
    from tensortap.api import lookup

    console.rule('tap.get("caught"): a weight of the other process, as it was there')
    weight = lookup.get(server.history, "caught")
    before = lookup.get(server.history, "caught", -1)
    moved = float(abs(weight - before).max())
    kind = f"{type(weight).__module__}.{type(weight).__name__}"
    console.print(f"a {kind} of shape {list(weight.shape)}; its largest change since the")
    console.print(f"first capture is {moved:.4f}")


def _compare(console: Console, good: Path, bad: Path) -> CompareReport:
    from tensortap.rooms.compare.runs import compare_runs
    from tensortap.rooms.compare.text import report_text

    console.rule("tap.compare(): the first difference")
    found = compare_runs(good, bad)
    console.print(report_text(found, 3))
    return found


def _alerts(console: Console, run: Path) -> None:
    """Print the alerts of the training with bugs, and where the trouble began."""
    from tensortap.api.run import Run

    found = [alert for alert in Run(run).alerts() if alert.origin]
    if found:
        console.rule("tap.track(alerts=True): what else went wrong in the second training")
    for alert in found[:3]:
        console.print(str(alert), style="red", soft_wrap=True)
        console.print(f"  it began in {alert.origin}", soft_wrap=True)


def _film(console: Console, run: Path, target: Path) -> list[Path]:
    """Film what the transformer attends to; return the files written."""
    from tensortap.api.run import Run

    console.rule('run.film("attention0", …): what the transformer attends to, while it learns')
    try:
        frames = Run(run).film("attention0", target, fps=10)
    except TensortapError as error:
        console.print(f"no film: {error}", style="yellow")
        return []
    console.print(f"{frames} frames in {target}", soft_wrap=True)
    return [target]


def _reports(console: Console, found: CompareReport, run: Path, folder: Path) -> list[Path]:
    """Write both reports if their packages are installed; return the files written."""
    try:
        from tensortap.rooms.report.run_report import report

        found.write_html(folder / "compare.html")
        report(run, folder / "report.html")
    except TensortapError as error:
        console.print(f"no report: {error}", style="yellow")
        return []
    return [folder / "compare.html", folder / "report.html"]


def _print_next_steps(console: Console, good: Path, bad: Path, pages: list[Path]) -> None:
    console.rule("what to open next")
    for page in pages:
        console.print(f"in a browser   {page}", soft_wrap=True)
    console.print(f"the page       tensortap view {good.parent}", soft_wrap=True)
    console.print(f"in a terminal  tensortap show {good}", soft_wrap=True)
    console.print(f"               tensortap compare {good} {bad}", soft_wrap=True)
    console.print(f'in Python      run = tap.open("{good}"); run.stats()', soft_wrap=True)
