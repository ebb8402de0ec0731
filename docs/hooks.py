"""Generate the API and command reference from the package while the site is built."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

COMMANDS = "<!-- commands -->"
NAMES = "<!-- names -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page by what the package says."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    return markdown.replace(NAMES, names()) if NAMES in markdown else markdown


def names() -> str:
    """Return one reference directive per public name."""
    import tensortap

    lines = []
    for name in tensortap.__all__:
        value = getattr(tensortap, name)
        if inspect.ismodule(value):
            lines.append(f"::: {value.__name__}")
        elif hasattr(value, "__module__"):
            lines.append(f"::: {value.__module__}.{value.__qualname__}")
    return "\n".join(lines)


def commands() -> str:
    """Return the help text of every command."""
    app = importlib.import_module("tensortap.cli.main").app
    found = sorted(info.name or info.callback.__name__ for info in app.registered_commands)
    lines = []
    for name in found:
        command = [sys.executable, "-m", "tensortap", name, "--help"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines += [f"## tensortap {name}", "", "```text", text.strip(), "```", ""]
    return "\n".join(lines)
