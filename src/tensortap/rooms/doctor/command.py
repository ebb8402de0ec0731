"""`tensortap doctor`: installed packages, kernels, a session, and a device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import typer

from tensortap.cli.terminal import json_option, print_json

_NEEDED = ("numpy", "ml_dtypes", "pyzmq", "msgspec", "xxhash", "rich", "typer", "executing")
_EXTRAS = {
    "torch": ("torch",),
    "jax": ("jax", "jaxlib"),
    "mlx": ("mlx",),
    "view": ("google-re2", "kaleido", "pandas", "plotly", "starlette", "uvicorn", "websockets"),
    "hdf5": ("h5py",),
    "video": ("av", "Pillow"),
    "tsne": ("scikit-learn",),
    "notebook": ("ipywidgets", "anywidget"),
    "mcp": ("google-re2", "mcp", "Pillow"),
    "s3": ("fsspec", "s3fs"),
    "scale": ("distributed",),
}


def doctor(
    server: str | None = typer.Argument(None, help="host:port. Default: TENSORTAP_SERVER."),
    device: str | None = typer.Option(
        None, help="Check a device instead: cpu, cuda, cuda:1, mps, jax, jax:tpu."
    ),
    as_json: bool = json_option(
        "tensortap, python, platform, memory, needed, missing, extras, shared memory, "
        "statistics kernel, key, environment, server, answers; of a device: check, result, "
        "details"
    ),
) -> None:
    """Print versions, installed packages, built kernels, and whether a session answers.

    With --device, check values, statistics, training and costs on that device; exit 1 if it fails.
    """
    if device is not None:
        _examine_device(device, as_json)
        return
    found = examine(server)
    if as_json:
        print_json(found)
    else:
        _show(found)
    if found["missing"]:
        raise typer.Exit(1)


def examine(server: str | None) -> dict[str, Any]:
    from tensortap._version import __version__
    from tensortap.core import buffers, limits
    from tensortap.live import keys
    from tensortap.live.address import parse_address

    versions = {name: _version(name) for name in _NEEDED}
    extras = {extra: {name: _version(name) for name in names} for extra, names in _EXTRAS.items()}
    try:
        key = "found" if keys.find_key() else "none yet: the first tap.serve() here creates one"
    except keys.KeyFileError as error:
        key = str(error)
    return {
        "tensortap": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "memory": limits.format_size(limits.total_memory()),
        "needed": versions,
        "missing": [name for name, version in versions.items() if version is None],
        "extras": extras,
        "shared memory": "yes" if buffers.can_share else "no memfd here: tensors go over TCP",
        "statistics kernel": _kernel(),
        "key": key,
        "environment": {
            name: "***" if "KEY" in name else text
            for name, text in os.environ.items()
            if "TENSORTAP" in name
        },
        "server": str(parse_address(server)),
        "answers": _ask(server),
    }


def _examine_device(device: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tensortap.rooms.doctor.device import contracts, examine_device

    os.environ["TENSORTAP_SERVER"] = "127.0.0.1:1"  # a session has nothing to do with this
    found = {name: list(examine_device(contract)) for name, contract in contracts(device)}
    styles = {"ok": "green", "note": "dim", "FAILED": "bold red"}
    if as_json:
        print_json(found)
    for name, rows in () if as_json else found.items():
        table = Table("check", "result", "details", box=None, pad_edge=False, title=name)
        for row in rows:
            result = Text(row["result"], style=styles[row["result"]])
            table.add_row(row["check"], result, Text(row["details"]))
        Console().print(table)
    if any(row["result"] == "FAILED" for rows in found.values() for row in rows):
        raise typer.Exit(1)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernel() -> str:
    from tensortap.stats.summarize import kernel

    if kernel is None:
        return "NumPy: the C kernel was not built; reinstall with a C compiler"
    return f"C, for {kernel.variant()}"


def _ask(server: str | None) -> str:
    from tensortap.api.open import RemoteSession
    from tensortap.core.errors import TensortapError

    try:
        with RemoteSession(server, 2.0) as view:
            seen = view.overview()
            return f"yes: process {seen.pid} has {len(seen.names)} names, {seen.written} records"
    except TensortapError as error:
        return f"no: {error}"


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()

    def add(*names: str) -> None:
        for name in names:
            table.add_row(name, Text(str(found[name])))

    add("tensortap", "python", "platform", "memory")
    for name, version in found["needed"].items():
        table.add_row(name, Text(version) if version else Text("missing", style="bold red"))
    for extra, packages in found["extras"].items():
        here = ", ".join(f"{n} {v}" for n, v in packages.items() if v)
        absent = ", ".join(n for n, v in packages.items() if not v)
        note = Text(here)
        if absent:
            note.append(f"{'; ' if here else ''}not installed: {absent}", style="dim")
        table.add_row(f"\\[{extra}]", note)
    add("shared memory", "statistics kernel", "key")
    for name, value in found["environment"].items():
        table.add_row(name, Text(value))
    style = "green" if found["answers"].startswith("yes") else "yellow"
    table.add_row(f"session at {found['server']}", Text(found["answers"], style=style))
    Console().print(table)
