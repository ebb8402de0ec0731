import gc
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import executing
import pytest

from tensortap.capture import names
from tensortap.capture.names import CallSites
from tests.processes import in_threads


def catch(value=None, *rest, **options):
    """Return the name that the real `catch` would give the value."""
    return CallSites().lookup(sys._getframe(1))


class Tap:
    catch = staticmethod(catch)


tap = Tap()


class Node:
    """Has every attribute and item, for writing expressions."""

    def __getattr__(self, name):
        return self

    def __getitem__(self, key):
        return self

    def __call__(self, *args, **options):
        return self


model = Node()


# --- expressions


def test_keeps_the_text_of_the_source():
    # fmt: off
    names = [
        catch(model["a"][:,0]),
        catch(  model   . weight  ),
        catch((model)),  # noqa: UP034
        catch(model[0] if True else 'x'),
        catch(model.größe["μ"].σ),
    ]
    # fmt: on
    assert names == [
        'model["a"][:,0]',
        "model . weight",
        "model",
        "model[0] if True else 'x'",
        'model.größe["μ"].σ',
    ]


def test_starred_arguments_have_no_expression():
    pair = (1, 2)
    options = {"value": 1}
    assert catch(*pair).startswith("value_test_starred_arguments_have")
    assert catch(**options).startswith("value_test_starred_arguments_have")


# --- locations


def _line():
    return sys._getframe(1).f_lineno


@pytest.mark.parametrize("problem", [RecursionError, MemoryError, SyntaxError, KeyError])
def test_errors_give_the_location(monkeypatch, problem):
    def fail(frame):
        raise problem("no")

    monkeypatch.setattr(executing.Source, "executing", fail)
    name = catch(model.weight)
    assert name == f"value_test_errors_give_the_location_{_line() - 1}"


def test_edited_file_is_not_used(tmp_path):
    path = tmp_path / "train.py"
    source = (
        "def step(a, b):\n    first = catch(a)\n    second = catch(b)\n    return first, second\n"
    )
    path.write_text(source)
    space = {"catch": catch}
    exec(compile(source, str(path), "exec"), space)
    assert space["step"](1, 2) == ("a", "b")

    fresh = {"catch": catch}
    exec(compile(source, str(path), "exec"), fresh)
    path.write_text("import this_line_is_new\n" + source)
    # line 3 now contains catch(a), in the columns where catch(b) was
    assert fresh["step"](1, 2) == ("value_step_2", "value_step_3")


# --- call sites


@pytest.fixture
def sites():
    return CallSites()


@pytest.fixture
def look(sites):
    return lambda value=None: sites.lookup(sys._getframe(1))


def cell(source, **space):
    """Run a cell of a notebook, whose source is only in memory; return its variables."""
    name = f"<{hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), space)
    return space


def test_other_functions_get_numbered_names(look):
    def one(x):
        return look(x)

    def two(x):
        return look(x)

    def three(x):
        return look(x), look(x)

    assert [one(0), two(0), three(0), one(0), two(0)] == ["x", "x_1", ("x_2", "x_2"), "x", "x_1"]


def test_numbered_names_never_collide_with_expressions(look):
    def one(x, x_1):
        return look(x), look(x_1)

    def two(x):
        return look(x)

    def three(x_1):
        return look(x_1)

    assert [one(0, 0), two(0), three(0)] == [("x", "x_1"), "x_2", "x_1_1"]


def test_cell_that_is_run_again_keeps_its_names(look):
    source = "x = 1\nout = look(x)\n"
    assert [cell(source, look=look)["out"] for _ in range(2)] == ["x", "x"]


def test_calls_without_source_stay_distinct(look):
    space = {"look": look}
    exec("def f(): return look(1), look(2)\nout = f() + f()", space)
    assert space["out"] == ("value_f_1", "value_f_1_1", "value_f_1", "value_f_1_1")


def test_each_site_is_resolved_once(monkeypatch, sites, look):
    found = []
    find = names._expression
    monkeypatch.setattr(names, "_expression", lambda *args: found.append(1) or find(*args))
    for _ in range(100):
        look(model.weight)
    assert len(found) == 1
    assert list(sites.known.values()) == ["model.weight"]


def test_reused_code_ids_are_not_confused(look):
    # new code objects often get the address of one that was just freed
    for index in range(200):
        space = {"look": look}
        exec(f"def f{index}(): return look(1)\nout = f{index}()", space)
        assert space["out"] == f"value_f{index}_1"
        del space
        gc.collect(0)


def test_threads_get_the_same_names(look):
    source = "\n".join(f"def f{i}(x): return look(x)" for i in range(40))
    space = cell(source, look=look)
    results = [{} for _ in range(8)]
    barrier = threading.Barrier(8)

    def run(result):
        barrier.wait()
        for i in range(40):
            result[i] = space[f"f{i}"](0)

    in_threads(run, results)
    assert all(result == results[0] for result in results)
    assert set(results[0].values()) == {"x"} | {f"x_{i}" for i in range(1, 40)}


# --- every supported Python


def interpreters():
    """Return this interpreter, and one of each other supported version that pyenv has."""
    found = {sys.version_info[:2]: sys.executable}
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in sorted(root.glob("versions/3.*/bin/python")):
        match = re.match(r"3\.(\d+)\.\d+$", path.parent.parent.name)
        if match and int(match[1]) >= 11:
            found.setdefault((3, int(match[1])), str(path))
    return [
        pytest.param(path, id=f"{major}.{minor}") for (major, minor), path in sorted(found.items())
    ]


def prepare(folder):
    """Copy what a script needs, without the rest of tensortap."""
    shutil.copy(names.__file__, folder / "names.py")
    if not (folder / "executing").exists():
        shutil.copytree(Path(executing.__file__).parent, folder / "executing")


PREAMBLE = """
import sys
import names
sites = names.CallSites()
def look(value=None, *rest, **options):
    return sites.lookup(sys._getframe(1))
"""


def run_python(python, folder, script, *options, stdin=None):
    prepare(folder)
    (folder / "looking.py").write_text(PREAMBLE)
    if stdin is None:
        path = folder / "script.py"
        path.write_text("from looking import *\n" + textwrap.dedent(script))
        options = (*options, str(path))
    result = subprocess.run(
        [python, *options],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


SCRIPT = """
import json
class M:
    class lm_head:
        weight = 1
model, pair = M, (1, 2)
out = {}
out["attribute"] = look(model.lm_head.weight)
out["keyword"] = look(every=1, value=model.lm_head)
out["unicode"] = ("μ", look(["μ", model]))[1]
out["two"] = [look(model), look(pair)]
out["semicolon"] = [look(1)]; out["semicolon"] += [look(2)]
out["lines"] = look(
    max(
        1,  # one
        2,
    ),
    "rest",
)
def outer(q):
    def inner(k):
        return look(k + q)
    return inner(1)
out["nested"] = outer(1)
out["lambda"] = (lambda v: look(v * 2))(1)
out["list"] = [look(v - 1) for v in pair]
out["set"] = sorted({look(v - 2) for v in pair})
out["dict"] = {v: look(v - 3) for v in pair}[1]
out["generator"] = list(look(v - 4) for v in pair)
def comprehension(x):
    return [look(x)] + [look(x) for x in pair] + [look(x) for _ in pair]
out["one function"] = comprehension(1)
def other(x):
    for i in range(3):
        yield look(x)
out["other function"] = list(other(1))
async def coroutine(z):
    return look(z)
try:
    coroutine(1).send(None)
except StopIteration as stop:
    out["coroutine"] = stop.value
class Layer:
    def __init__(self, w):
        self.name = look(self)
    def forward(self, x):
        with open(__file__):
            try:
                return look(self.name.upper()) if x else None
            finally:
                pass
out["method"] = Layer(1).forward(1)
assert look(out).startswith("out")
out["f-string"] = f"{look(model)}"
out["map"] = list(map(look, pair))
space = {"look": look}
exec("def g(y):\\n    return look(y)\\ngot = g(1)", space)
out["exec"] = space["got"]
print(json.dumps(out))
"""

EXPECTED = {
    "attribute": "model.lm_head.weight",
    "keyword": "model.lm_head",
    "unicode": '["μ", model]',
    "two": ["model", "pair"],
    "semicolon": ["1", "2"],
    "lines": "max(1, 2)",
    "nested": "k + q",
    "lambda": "v * 2",
    "list": ["v - 1", "v - 1"],
    "set": ["v - 2"],
    "dict": "v - 3",
    "generator": ["v - 4", "v - 4"],
    "one function": ["x"] * 5,
    "other function": ["x_1"] * 3,
    "coroutine": "z",
    "method": "self.name.upper()",
    "f-string": "model",
    "map": ["map(look, pair)"] * 2,
    "exec": "value_g_2",
}


@pytest.mark.parametrize("python", interpreters())
class TestEveryPython:
    def test_script(self, python, tmp_path):
        assert json.loads(run_python(python, tmp_path, SCRIPT)) == EXPECTED

    def test_command(self, python, tmp_path):
        program = "from looking import *\nx = 1\nprint(look(x))"
        # Python 3.13 keeps the text of -c for tracebacks, so the expression is available
        assert run_python(python, tmp_path, "", "-c", program, stdin="") in (
            "value_module_3\n",
            "x\n",
        )
