"""runtime_info.json: the command, its environment, the machine and the seeds.

Collecting this imports and initializes nothing: a framework is asked only if the program has
loaded it, and a device only if the program already uses it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from tensortap.rooms.provenance.redact import Redactor

_LAUNCHERS = ("torchrun", "torch.distributed", "accelerate", "deepspeed", "lightning", "fabric")


def runtime_info() -> dict[str, Any]:
    """Return the content of runtime_info.json.

    >>> sorted(runtime_info()["command"])[:3]
    ['argv', 'executable', 'full_command']
    """
    redactor = Redactor()
    try:
        working_directory = os.getcwd()
    except OSError:  # it was deleted
        working_directory = os.environ.get("PWD", "")
    return {
        "command": _command(redactor),
        "environment_variables": {
            _text(name): _text(value) for name, value in redactor.variables(os.environ).items()
        },
        "working_directory": _text(working_directory),
        "timestamp": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": " ".join(sys.version.split()),
        "seeds": seeds(),
        "device_names": device_names(),
    }


def comparable(info: dict[str, Any]) -> dict[str, Any]:
    """Return the part of runtime_info.json that makes a new version when it changes."""
    return {key: value for key, value in info.items() if key != "timestamp"}


def _command(redactor: Redactor) -> dict[str, Any]:
    """Return ``argv`` as the program sees it, and ``full_command`` to paste into a shell."""
    original = sys.orig_argv[1:] or sys.argv  # the latter for Python inside another program
    full = shlex.join([sys.executable or "python", *redactor.arguments(original)])
    command = {
        "executable": _text(sys.executable or ""),
        "argv": [_text(word) for word in redactor.arguments([str(word) for word in sys.argv])],
        "full_command": _text(full),
    }
    launcher = _launcher()
    if launcher:
        command["launcher"] = _text(shlex.join(redactor.arguments(launcher)))
    return command


def _launcher() -> list[str]:
    """Return the command of torchrun or a similar launcher, if one has started this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return []
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    words = [os.fsdecode(word) for word in command.split(b"\0") if word]
    known = any(name in word for word in words[:4] for name in _LAUNCHERS)
    return words if known else []


def seeds() -> dict[str, Any]:
    """Return the seeds that can be read without drawing a number."""
    found: dict[str, Any] = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED")}
    torch: Any = sys.modules.get("torch")
    jax: Any = sys.modules.get("jax")
    with contextlib.suppress(AttributeError):  # not imported, or half imported
        found["torch"] = torch.default_generator.initial_seed()
        found["torch_deterministic"] = torch.are_deterministic_algorithms_enabled()
    with contextlib.suppress(AttributeError):
        found["jax_default_prng_impl"] = str(jax.config.jax_default_prng_impl)
        found["jax_enable_x64"] = bool(jax.config.jax_enable_x64)
    return found


def device_names() -> list[str]:
    """Return the processor and the NVIDIA devices; other accelerators are not looked for."""
    found = [_processor()]
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            lines = file.read_text("utf-8", "replace").splitlines()
            found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def _processor() -> str:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        for line in lines:
            if line.startswith(("model name", "Model", "Hardware")):
                name = line.partition(":")[2].strip()
                break
    return f"{name} ({os.cpu_count() or 1} cores)"


def _text(text: str) -> str:
    """Return text for JSON: bytes that are not UTF-8 become question marks."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
