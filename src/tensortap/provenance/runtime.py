"""runtime_info.json: the command, its environment, the machine and the seeds; only looked at.

Nothing is imported or initialised: a framework is asked only if the program has loaded it, and a
device only if the program has it in use already.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from tensortap.provenance.redact import Redactor

# What one launcher or another sets for each of the processes that it starts.
LAUNCHED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip


def runtime_info(redactor: Redactor | None = None) -> dict[str, Any]:
    """What runtime_info.json holds.

    >>> sorted(runtime_info()["command"])[:3]
    ['argv', 'executable', 'full_command']
    """
    redactor = redactor or Redactor()
    return {
        "command": command_info(redactor),
        "environment_variables": {
            _text(name): _text(value) for name, value in redactor.variables(os.environ).items()
        },
        "working_directory": _text(_working_directory()),
        "timestamp": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": " ".join(sys.version.split()),
        "seeds": seeds(),
        "device_names": device_names(),
    }


def comparable(info: dict[str, Any]) -> dict[str, Any]:
    """What of runtime_info.json makes a new version when it changes: not clocks and states."""
    seen = {key: value for key, value in info.items() if key != "timestamp"}
    seen["seeds"] = {k: v for k, v in info["seeds"].items() if not k.endswith("_state")}
    return seen


def command_info(redactor: Redactor) -> dict[str, Any]:
    """The command: ``argv`` as the program sees it, ``full_command`` to paste into a shell."""
    original = list(getattr(sys, "orig_argv", ()))[1:]
    if not original:
        original = list(sys.argv)  # Python inside another program
    command = {
        "executable": _text(sys.executable or ""),
        "argv": [_text(a) for a in redactor.arguments([str(a) for a in sys.argv])],
        "full_command": _text(
            shlex.join([sys.executable or "python", *redactor.arguments(original)])
        ),
    }
    launcher = _launcher(redactor)
    if launcher:
        command["launcher"] = launcher
    return command


def _launcher(redactor: Redactor) -> str:
    """The command of torchrun and its kind, if one of them started this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return ""
    try:
        parts = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    words = [os.fsdecode(part) for part in parts if part]
    known = ("torchrun", "torch.distributed", "accelerate", "deepspeed", "lightning", "fabric")
    if not any(name in word for word in words[:4] for name in known):
        return ""
    return _text(shlex.join(redactor.arguments(words)))


def seeds() -> dict[str, Any]:
    """The seeds that can be read without drawing a number.

    A ``…_state`` is a fingerprint of a generator: equal ones will draw equal numbers.
    """
    found: dict[str, Any] = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED")}
    for name, look in (("random", _random), ("numpy", _numpy), ("torch", _torch), ("jax", _jax)):
        if name in sys.modules:
            try:
                found.update(look(sys.modules[name]))
            except Exception:  # half imported, an old version: there is none to read
                continue
    return found


def _random(random: Any) -> dict[str, Any]:
    return {"random_state": _fingerprint(repr(random.getstate()).encode())}


def _numpy(numpy: Any) -> dict[str, Any]:
    if "numpy.random" not in sys.modules:
        return {}
    state = sys.modules["numpy.random"].get_state(legacy=False)
    inner = state["state"]
    data = inner["key"].tobytes() if "key" in inner else repr(sorted(inner.items())).encode()
    return {"numpy_state": _fingerprint(data + repr(inner.get("pos")).encode())}


def _torch(torch: Any) -> dict[str, Any]:
    return {
        "torch": torch.initial_seed(),
        "torch_deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _jax(jax: Any) -> dict[str, Any]:
    return {
        "jax_default_prng_impl": str(jax.config.jax_default_prng_impl),
        "jax_enable_x64": bool(jax.config.jax_enable_x64),
    }


def _fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def device_names() -> list[str]:
    """The processor, and the accelerators that are known without waking one up."""
    found = [_processor()]
    for look in (_cuda_of_torch, _devices_of_jax):
        try:
            names = look()
        except Exception:  # a driver that is in a bad state must not matter here
            names = []
        found += names
    if len(found) == 1:
        found += _cuda_of_driver()
    return [name for name in found if name]


def _cuda_of_torch() -> list[str]:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    return [str(cuda.get_device_name(at)) for at in range(cuda.device_count())]


def _devices_of_jax() -> list[str]:
    bridge = sys.modules.get("jax._src.xla_bridge")
    backends = vars(bridge).get("_backends") if bridge is not None else None
    if not isinstance(backends, dict):
        return []
    return [
        str(device.device_kind)
        for platform_name, backend in list(backends.items())
        if platform_name not in ("cpu", "interpreter")
        for device in backend.local_devices()
    ]


def _cuda_of_driver() -> list[str]:
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = file.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def _processor() -> str:
    count = os.cpu_count() or 1
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(("model name", "Model", "Hardware")):
                    return f"{line.partition(':')[2].strip()} ({count} cores)"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()} ({count} cores)"


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted under our feet
        return os.environ.get("PWD", "")


def _text(text: str) -> str:
    """Text that every JSON reader takes: bytes that are no UTF-8 become question marks."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
