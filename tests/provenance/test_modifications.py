"""The finder reports monkey patches of packages, and nothing else."""

import json

import pytest

LINEAR = "torch.nn.modules.linear.Linear"
ROUNDS = [  # each round in a process of its own: statement → what it replaces
    {
        "torch.nn.Linear.forward = new": f"{LINEAR}.forward",
        "torch.nn.Linear.__call__ = new": f"{LINEAR}.__call__",
        "torch.nn.Linear.from_nowhere = classmethod(new)": f"{LINEAR}.from_nowhere",
        "torch.nn.functional.silu = lambda x: x": "torch.nn.functional.silu",
        "torch.matmul = new": "torch.matmul",
        "torch.Tensor.add = new": "torch.Tensor.add",
        "torch.optim.Adam.step = mock.MagicMock()": "torch.optim.adam.Adam.step",
        "torch.nn.modules.normalization.LayerNorm = Own": (
            "torch.nn.modules.normalization.LayerNorm"
        ),
        "numpy.mean = new": "numpy.mean",
        "builtins.sum = new": "builtins.sum",
        "math.sqrt = new": "math.sqrt",
        "configparser.RawConfigParser.read = new": "configparser.RawConfigParser.read",
    },
    {"torch.nn.Linear.forward = functools.partialmethod(new)": f"{LINEAR}.forward"},
    {
        "torch.nn.Linear.forward = functools.wraps(torch.nn.Linear.forward)(new)": (
            f"{LINEAR}.forward"
        ),
        "torch.nn.functional.silu.__code__ = (lambda input, inplace=False: input).__code__": (
            "torch.nn.functional.silu"
        ),
    },
]

PROGRAM = """
    import json, sys, textwrap
    original, textwrap.shorten = textwrap.shorten, lambda text: None  # before tensortap is imported
    import asyncio, builtins, configparser, functools, importlib.util, logging, math, os
    import threading, time, types, warnings
    from unittest import mock
    import numpy, torch, jax, jax.numpy as jnp
    import hypothesis, msgspec, pytest, rich.console, typer, zmq
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

    # frameworks in use
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    model(torch.ones(2, 3)).sum().backward()
    jax.jit(jax.grad(lambda x: (x ** 2).sum()))(jnp.ones(3))

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
        assert found.keys() == set(wanted.values())
    described = result["patches"][0][f"{LINEAR}.forward"]
    assert described.keys() == {"by", "file", "line"}
    assert (described["by"], described["line"]) == ("__main__.new", 11)
    assert described["file"].endswith("train.py")
    assert result["took"] < 10  # seconds of the processor; on a busy machine 1.1
