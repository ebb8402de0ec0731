"""runtime_info.json, and that collecting it changes nothing."""

import datetime
import json
import os
import shlex
import subprocess
import sys

import pytest

from tensortap.rooms.provenance.runtime import runtime_info

pytestmark = pytest.mark.slow

KEYS = {
    "command", "environment_variables", "working_directory", "timestamp", "host", "pid", "python",
    "seeds", "device_names",
}  # fmt: skip


def test_keys():
    info = runtime_info()
    assert info.keys() == KEYS
    assert info["command"].keys() == {"executable", "argv", "full_command"}
    assert info["pid"] == os.getpid()
    assert info["working_directory"] == os.getcwd()
    assert datetime.datetime.fromisoformat(info["timestamp"]).tzinfo is not None
    assert info["device_names"]
    json.dumps(info)


SHOW = "import json; from tensortap.rooms.provenance.runtime import runtime_info as r; "
SHOW += "print(json.dumps(r()))"


def test_command_can_be_pasted_into_a_shell(python, tmp_path):
    hard = ["a b", "it's", "$HOME", "*", "ü", "", "--x=1 2"]
    first = json.loads(python(SHOW, *hard, environ={"ODD": os.fsdecode(b"\xff")}))
    assert first["environment_variables"]["ODD"].isprintable()
    assert first["command"]["argv"][1:] == hard
    assert first["command"]["executable"] == sys.executable
    again = subprocess.run(
        first["command"]["full_command"], shell=True, cwd=tmp_path, capture_output=True, check=True,
        env={**os.environ, "PYTHONPATH": "src" + os.pathsep + os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert json.loads(again.stdout)["command"] == first["command"]


def test_draws_no_number_and_initializes_nothing(python):
    out = python("""
        import json, random, sys
        import numpy, torch, jax
        torch.manual_seed(7); numpy.random.seed(3); random.seed(5)
        from tensortap.rooms.provenance.runtime import runtime_info
        before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
        one, two = runtime_info(), runtime_info()
        after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
        assert before[:2] == after[:2] and torch.equal(before[2], after[2])
        assert one["seeds"] == two["seeds"]
        assert not torch.cuda.is_initialized()
        assert not sys.modules["jax._src.xla_bridge"]._backends
        print(json.dumps(one["seeds"]))
    """)
    seeds = json.loads(out)
    assert seeds["torch"] == 7
    assert seeds["jax_default_prng_impl"] == "threefry2x32"


def test_imports_nothing(python):
    out = python("""
        import sys
        import tensortap.rooms.provenance
        from tensortap.rooms.provenance.runtime import runtime_info
        from tensortap.rooms.provenance.runtime import packages_info
        runtime_info(), packages_info()
        print(*{"torch", "jax", "numpy", "pandas", "msgspec"} & set(sys.modules))
    """)
    assert set(out.split()) <= {"numpy", "msgspec"}  # what `import tensortap` brings


def test_half_imported_frameworks(python):
    out = python("""
        import sys, types
        for name in ("torch", "jax", "numpy", "numpy.random"):
            sys.modules[name] = types.ModuleType(name)
        from tensortap.rooms.provenance.runtime import device_names, seeds
        print(sorted(seeds()), len(device_names()))
    """)
    assert out.split()[-1] == "1"


def test_records_launcher(python, tmp_path):
    (tmp_path / "prog.py").write_text(SHOW)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--master-port=0",
         "prog.py", "--lr=1"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command = json.loads(done.stdout)["command"]
    assert shlex.split(command["launcher"])[1:3] == ["-m", "torch.distributed.run"]
    assert command["argv"] == ["prog.py", "--lr=1"]
    assert shlex.split(command["full_command"])[1:] == ["-u", "prog.py", "--lr=1"]
