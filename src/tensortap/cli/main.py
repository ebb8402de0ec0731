"""The `tensortap` command: its subcommands and their exit codes."""

from __future__ import annotations

import re
import sys

import typer

from tensortap._version import __version__
from tensortap.cli import (
    compare,
    demo,
    doctor,
    export,
    film,
    ls,
    ranks,
    report,
    reproduce,
    serve,
    show,
    top,
    view,
)
from tensortap.errors import TensortapError
from tensortap.files import plain

app = typer.Typer(
    name="tensortap",
    help="See the tensors of a running training job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    serve.serve, top.top, view.view, doctor.doctor, ls.ls, ranks.ranks, show.show, compare.compare,
    export.export, film.film, report.report, reproduce.reproduce, demo.demo,
):  # fmt: skip
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """See the tensors of a running training job."""


def main() -> None:
    """Run a command; exit with 0 for fine, 1 for found or differs, 2 for misuse."""
    try:
        app()
    except (MemoryError, RecursionError) as error:
        what = "memory" if isinstance(error, MemoryError) else "depth"
        print(f"tensortap: this needs more {what} than there is", file=sys.stderr)
        sys.exit(2)
    except (TensortapError, ValueError, OSError) as error:
        # errors name Python arguments; spell them as options
        words = re.sub(
            r"\b(?:say|pass) (kind|rank)='?(\w+)'?( or rank='all')?", r"pass --\1 \2", str(error)
        )
        print(f"tensortap: {plain(words, 2000)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
