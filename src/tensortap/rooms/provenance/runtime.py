"""runtime_info.json and packages.json: command, environment, machine, seeds, and what is installed.

Collecting this imports and initializes nothing: a framework is asked only if the program has
loaded it, and a device only if the program already uses it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
import site
import socket
import sys
import sysconfig
import types
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tensortap.rooms.provenance.redact import Redactor

PYTHON = "python"  # the owner of the standard library


def project_folder() -> Path:
    """Return the folder of the main script, or the working directory if there is none.

    A launcher that a package has installed (torchrun, pytest, ipykernel) is no main script.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(file, str) and os.path.isfile(file):
        path = os.path.abspath(file)
        scripts = os.path.join(sysconfig.get_path("scripts"), "")
        if not path.startswith(scripts) and owner_of_file(path) is None:
            return Path(path).parent
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return Path(os.sep)


@functools.cache
def _library_folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of installed packages and those of the standard library."""
    sites = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    sites |= set(site.getsitepackages()) | {site.getusersitepackages()}
    stdlib = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    both = []
    for folders in (sites, stdlib):
        real = folders | {os.path.realpath(folder) for folder in folders}
        ordered = sorted((os.path.join(folder, "") for folder in real), key=len, reverse=True)
        both.append(tuple(ordered))
    return both[0], both[1]


def owner_of_file(file: str) -> str | None:
    """Return the package that a file was installed with, "python", or None for other files.

    >>> import json
    >>> owner_of_file(json.__file__)
    'python'
    """
    sites, stdlib = _library_folders()
    for folder in sites:
        if file.startswith(folder):
            return file[len(folder) :].partition(os.sep)[0].partition(".")[0]
    for folder in ("/site-packages/", "/dist-packages/"):  # of another environment on the path
        _, found, rest = file.rpartition(folder)
        if found:
            return rest.partition("/")[0].partition(".")[0]
    return PYTHON if file.startswith(("<frozen ", *stdlib)) else None


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


# -- packages.json: distributions that are installed, and those that the program uses -----------

# Only name and version: parsing all metadata takes ten times as long. A package whose module has
# another name (PIL, yaml) has its version only, and one installed with ``setup.py develop``, which
# has no ``direct_url.json``, counts as installed normally.
_HEAD = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t]*$", re.MULTILINE)


def packages_info() -> dict[str, Any]:
    """Return the content of packages.json.

    >>> packages_info()["packages"]["tensortap"]["version"]
    '...'
    """
    redactor = Redactor()
    imported = _imported()
    installed = list(_distributions())
    used: dict[str, dict[str, Any]] = {}
    for name, version, dist in installed:
        location = imported.get(normalized(name))
        origin = _origin(dist, redactor)
        if location or origin:
            location = location or str(dist.locate_file(""))
            used[name] = {"version": version, "location": location, **origin}
    versions = {name: version for name, version, _ in installed}
    return {
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "all_packages": dict(sorted(versions.items(), key=lambda item: item[0].lower())),
        "packages": dict(sorted(used.items(), key=lambda item: item[0].lower())),
    }


def normalized(name: str) -> str:
    """Return the name of a distribution in the form in which names are compared.

    >>> normalized("Ruamel.YAML_clib")
    'ruamel-yaml-clib'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _distributions() -> Iterator[tuple[str, str, Distribution]]:
    seen = set()
    for dist in importlib.metadata.distributions():
        text = _read(dist, "METADATA") or _read(dist, "PKG-INFO")
        head = dict(_HEAD.findall(text[:4096].partition("\n\n")[0]))
        name, version = head.get("Name", ""), head.get("Version", "")
        # the first on the path is the one that is imported
        if name and normalized(name) not in seen:
            seen.add(normalized(name))
            yield name, version, dist


def _read(dist: Distribution, file: str) -> str:
    try:
        return dist.read_text(file) or ""
    except (OSError, UnicodeDecodeError):
        return ""


def _imported() -> dict[str, str]:
    """Return where the loaded top-level modules are, except Python's own, by normalized name."""
    found = {}
    for name, module in sys.modules.copy().items():  # a list of them may run finalizers
        if "." in name or name == "__main__" or not issubclass(type(module), types.ModuleType):
            continue
        content = object.__getattribute__(module, "__dict__")
        file = content.get("__file__")
        if isinstance(file, str) and owner_of_file(file) != PYTHON:
            found[normalized(name)] = os.path.dirname(file) if "__path__" in content else file
    return found


def _origin(dist: Distribution, redactor: Redactor) -> dict[str, Any]:
    """Return where a distribution came from, if not from an index."""
    try:
        stated = json.loads(_read(dist, "direct_url.json") or "null")
    except ValueError:
        return {}
    if not isinstance(stated, dict) or not isinstance(stated.get("url"), str):
        return {}
    url: str = stated["url"]
    origin: dict[str, Any] = {"url": redactor.text(url)}
    if (stated.get("dir_info") or {}).get("editable"):
        origin["editable"] = True
    if url.startswith("file:"):
        origin["source"] = unquote(urlsplit(url).path)
    vcs = stated.get("vcs_info") or {}
    if vcs.get("commit_id"):
        origin["vcs"] = str(vcs.get("vcs") or "git")
        origin["commit_id"] = str(vcs["commit_id"])
    return origin
