"""The finder reports monkey patches of packages, and nothing else."""

import json

import pytest

LINEAR = "torch.nn.modules.linear.Linear"
ROUNDS = [  # each round in a process of its own: statement → (what it replaces, kind)
    {
        "torch.nn.Linear.forward = new": (f"{LINEAR}.forward", "replaced"),
        "torch.nn.Linear.__call__ = new": (f"{LINEAR}.__call__", "overrides"),
        "torch.nn.Linear.from_nowhere = classmethod(new)": (f"{LINEAR}.from_nowhere", "added"),
        "torch.nn.Module.__call__ = new": ("torch.nn.modules.module.Module.__call__", "replaced"),
        "torch.nn.functional.silu = lambda x: x": ("torch.nn.functional.silu", "replaced"),
        "torch.matmul = new": ("torch.matmul", "replaced"),
        "torch.Tensor.add = new": ("torch.Tensor.add", "overrides"),
        "torch.Tensor.mine = new": ("torch.Tensor.mine", "added"),
        "torch.optim.Adam.step = mock.MagicMock()": ("torch.optim.adam.Adam.step", "replaced"),
        "torch.nn.modules.normalization.LayerNorm = Own": (
            "torch.nn.modules.normalization.LayerNorm",
            "replaced",
        ),
        "numpy.mean = new": ("numpy.mean", "replaced"),
        "builtins.sum = new": ("builtins.sum", "replaced"),
        "math.sqrt = new": ("math.sqrt", "replaced"),
        "configparser.RawConfigParser.read = new": (
            "configparser.RawConfigParser.read",
            "replaced",
        ),
        "textwrap.fill = new": ("textwrap.fill", "replaced"),
    },
    {
        "torch.nn.Linear.forward = functools.partialmethod(new)": (f"{LINEAR}.forward", "replaced"),
    },
    {
        "torch.nn.Linear.forward = functools.wraps(torch.nn.Linear.forward)(new)": (
            f"{LINEAR}.forward",
            "replaced",
        ),
        "torch.nn.functional.silu.__code__ = (lambda input, inplace=False: input).__code__": (
            "torch.nn.functional.silu",
            "replaced",
        ),
    },
]

PROGRAM = """
    import json, sys, textwrap
    original, textwrap.shorten = textwrap.shorten, lambda text: None  # before tensortap is imported
    import asyncio, builtins, configparser, functools, importlib.util, logging, math, os
    import threading, time, types, warnings
    from unittest import mock
    import numpy, torch, torch._dynamo, torch.distributed, torch.distributed.fsdp, torch.utils.data
    import jax, jax.experimental.pallas, jax.numpy as jnp, networkx, scipy.stats, sympy
    import hypothesis.extra.numpy, msgspec, pydantic, pytest, rich.console, typer, zmq
    from tensortap.rooms.provenance.modifications import Finder

    def new(*args, **kwargs):
        return args

    class Own:
        def f(self): return 1

    early = list(Finder().find())
    textwrap.shorten = original

    # attributes that Python offers for replacement
    sys.excepthook = threading.excepthook = warnings.showwarning = new
    logging.captureWarnings(True)

    # lazy objects
    spec = importlib.util.find_spec("turtledemo")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules["turtledemo"] = lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    class Explosive(types.ModuleType):
        def __getattribute__(self, name): raise RuntimeError("triggered")
    class Touchy(type):
        def __getattribute__(cls, name): raise RuntimeError("triggered")
    class Proxy:
        @property
        def __class__(self): raise RuntimeError("triggered")
        def __getattr__(self, name): raise RuntimeError("triggered")
    sys.modules |= {"explosive": Explosive("x"), "proxy": Proxy(), "none": None}
    sys.modules["package"] = package = types.ModuleType("package")
    package.touchy, package.proxy = Touchy("X", (), {"__module__": "package"}), Proxy()

    # frameworks in use
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    model(torch.ones(2, 3)).sum().backward()
    torch.optim.Adam(model.parameters()).step()
    jax.jit(jax.grad(lambda x: (x ** 2).sum()))(jnp.ones(3))
    before = set(sys.modules)

    finder = Finder()
    start = time.thread_time()
    quiet = list(finder.find())
    took = time.thread_time() - start
    new_modules = set(sys.modules) - before
    patches = []
    for statements in json.loads(sys.argv[1]):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            exec(compile(statements, __file__, "exec"))
            found = {where: m._asdict() for where, m in finder.find().items()}
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            patches.append(json.loads(pipe.read()))
        assert os.waitpid(child, 0)[1] == 0, statements
    print(json.dumps({
        "early": early, "quiet": quiet, "lazy": type(lazy).__name__, "imported": [*new_modules],
        "patches": patches, "took": took,
    }))
"""


@pytest.mark.slow
def test_finds_patches_and_nothing_else(run_python, tmp_path):
    """In one process, and in forks of it that have patched something; its imports take seconds."""
    statements = ["\n".join(patches) for patches in ROUNDS]
    out = run_python(tmp_path, PROGRAM, json.dumps(statements))
    result = json.loads(out.splitlines()[-1])
    assert result["early"] == ["textwrap.shorten"]  # made before tensortap was imported
    assert result["quiet"] == []
    assert result["lazy"] == "_LazyModule"
    assert result["imported"] == []
    for wanted, found in zip(ROUNDS, result["patches"], strict=True):
        assert {where: m["kind"] for where, m in found.items()} == dict(wanted.values())
        assert {key for m in found.values() for key in m} == {
            "kind", "by", "module", "file", "line", "original",
        }  # fmt: skip
    described = result["patches"][0][f"{LINEAR}.forward"]
    assert described["by"] == "__main__.new"
    assert described["module"] == "__main__"
    assert described["file"].endswith("train.py")
    assert described["line"] == 12
    assert "torch/nn/modules/linear.py:" in described["original"]
    assert result["took"] < 10  # seconds of the processor; on a busy machine 1.1


@pytest.mark.slow
def test_raises_no_false_alarm_inside_pytest(python, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest, warnings\n"
        "from hypothesis import given, strategies as st\n"
        "from tensortap.rooms.provenance.modifications import Finder\n"
        "@pytest.fixture\n"
        "def fixed(): return 1\n"
        "@given(st.integers())\n"
        "def test_a(x): pass\n"
        "@pytest.mark.parametrize('x', [1])\n"
        "def test_b(x, fixed, capsys): assert Finder().find() == {}\n"
    )
    out = python("import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))")
    assert "2 passed" in out
