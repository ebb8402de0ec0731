"""The `tensortap` command: its subcommands and their exit codes."""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any

import typer

from tensortap._version import __version__
from tensortap.cli import ls, serve, show, view
from tensortap.cli.terminal import message
from tensortap.core.errors import TensortapError
from tensortap.core.files import plain
from tensortap.core.rooms import load, rooms

_UsageError: Any = typer.BadParameter.__mro__[1]  # typer does not export it

app = typer.Typer(
    name="tensortap",
    help="See the tensors of a running training job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_commands: dict[str, Any] = {
    "ls": ls.ls, "serve": serve.serve, "show": show.show, "view": view.view,
}  # fmt: skip
for _room in rooms().values():
    _commands |= {name: load(address) for name, address in _room.commands.items()}
for _name, _command in sorted(_commands.items()):
    app.command(_name, context_settings=getattr(_command, "context_settings", None))(_command)


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
        sys.exit(app(standalone_mode=False, prog_name="tensortap") or 0)
    except _UsageError as error:
        words = error.format_message().rstrip(".")
        if words:  # else the help has been printed
            _complain(f"{words}; see {error.ctx.command_path if error.ctx else 'tensortap'} --help")
        sys.exit(2)
    except (MemoryError, RecursionError) as error:
        what = "memory" if isinstance(error, MemoryError) else "depth"
        _complain(f"this needs more {what} than there is")
        sys.exit(2)
    except (TensortapError, ValueError, OSError) as error:
        _complain(_spelled(str(error)))
        sys.exit(2)
    except typer.Abort:
        _complain("aborted")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _complain(words: str) -> None:
    message(plain(words, 2000))


def _spelled(words: str) -> str:
    """Return an error with the option that it is about, spelled as it was typed."""
    words = re.sub(r"\b(?:say|pass) (kind|rank)='?(\w+)'?( or rank='all')?", r"pass --\1 \2", words)
    found: list[tuple[int, str]] = []  # how well an option matches, and what to print
    for word, following in itertools.pairwise([*sys.argv[1:], ""]):
        option, given, value = word.partition("=")
        if option[:2] != "--" or option in words:
            continue
        name = "mapping" if option == "--map" else option[2:].replace("-", "_")
        value = re.escape(text := value if given else following)
        # the value may be of another argument, as the port of a session is
        other = re.search(r"got '(.+)'$", words)
        if re.match(rf"{name}s?[ :]", words) and not (other and other[1] not in text):
            return re.sub(r"^\w+", option, words)
        if text and re.search(rf"\b{name} '?{value}\b|(?<!\w){value}(?!\w)(?<=..)", words):
            found.append((len(text), f"{option} {text}: {words}"))
    return max(found)[1] if found else words
