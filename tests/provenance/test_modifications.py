"""Monkey patches are found, and nothing else."""

import json

import pytest

LOOK = """
    import json
    from tensortap.provenance.modifications import find
    print(json.dumps({where: m.as_json() for where, m in find().items()}))
"""


@pytest.fixture
def look(python, tmp_path):
    """The modifications that a program finds in itself."""

    def look(code, **options):
        found = json.loads(python(code + LOOK, **options).splitlines()[-1])
        assert all(set(m) == {"kind", "by", "module", "file", "line", "original"}
                   for m in found.values())  # fmt: skip
        return found

    return look


@pytest.mark.parametrize(
    "imports",
    [
        "import numpy",
        "import torch, torch.distributed, torch.utils.data, torch._dynamo, torch.distributed.fsdp",
        "import jax, jax.numpy, jax.experimental.pallas",
        "import scipy.stats, sympy, networkx, hypothesis, hypothesis.extra.numpy, pytest",
        "import msgspec, zmq, rich.console, typer, pydantic, asyncio, unittest.mock, logging",
    ],
)
def test_no_false_alarm(look, imports):
    assert look(f"\n    {imports}\n") == {}


def test_no_false_alarm_after_use(look):
    assert (
        look("""
    import torch, jax, jax.numpy as jnp, numpy as np
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward(); optimizer.step()
    jax.jit(jax.grad(lambda x: (x ** 2).sum()))(jnp.ones(3))
    torch.jit.script(model)
    np.random.default_rng(0).normal()
        """)
        == {}
    )


def test_no_false_alarm_inside_pytest(python, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest, warnings\n"
        "from hypothesis import given, strategies as st\n"
        "from tensortap.provenance.modifications import find\n"
        "@pytest.fixture\n"
        "def fixed(): return 1\n"
        "@given(st.integers())\n"
        "def test_a(x): pass\n"
        "@pytest.mark.parametrize('x', [1])\n"
        "def test_b(x, fixed, capsys): assert find() == {}\n"
    )
    out = python("import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))")
    assert "2 passed" in out


PROJECT = """
    import collections, dataclasses, enum, functools, typing, abc, contextlib
    from torch.nn.functional import relu
    from os.path import join as joined

    def plain(): return 1
    def other(): return 2
    alias = plain
    short = lambda: 3

    def wrapping(f):
        @functools.wraps(f)
        def inner(*args): return f(*args)
        return inner

    def careless(f):
        return lambda *args: f(*args)

    @wrapping
    def wrapped(): return 1
    @careless
    def unwrapped(): return 1
    @functools.lru_cache
    def cached(): return 1
    @contextlib.contextmanager
    def manager(): yield
    @functools.singledispatch
    def dispatched(x): return 1
    @dispatched.register
    def _(x: int): return 2
    late = wrapping(other)
    part = functools.partial(other)

    def register(cls):
        cls.registered = lambda self: 1
        cls.forward = plain
        return cls

    class Net:
        def forward(self): return 1
        alias = forward
        short = lambda self: 1
        @property
        def prop(self): return 1
        @prop.setter
        def prop(self, value): pass
        @staticmethod
        def static(): return 1
        @classmethod
        def klass(cls): return 1
        @functools.cached_property
        def once(self): return 1
        @wrapping
        def wrapped(self): return 1
        def __hidden(self): return 1
        for_part = functools.partialmethod(forward)
        class Inner:
            def f(self): return 1

    class Sub(Net): pass
    @register
    class Registered(Net): pass
    @dataclasses.dataclass(order=True, frozen=True)
    class Data:
        x: int = 1
    @functools.total_ordering
    class Ordered:
        def __lt__(self, other): return True
    Pair = collections.namedtuple("Pair", "a b")
    class Typed(typing.NamedTuple):
        a: int
    class Colour(enum.Enum):
        RED = 1
    class Proto(typing.Protocol):
        def f(self): ...
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def f(self): ...
    Made = type("Made", (Net,), {"forward": plain})
    class Meta(type):
        def __new__(mcs, name, bases, held):
            held["forward"] = other
            return super().__new__(mcs, name, bases, held)
    class WithMeta(Net, metaclass=Meta): pass
"""


@pytest.fixture
def project(tmp_path):
    import textwrap

    (tmp_path / "project.py").write_text(textwrap.dedent(PROJECT))
    return "\n    import functools, project\n    from unittest import mock\n"


def test_no_false_alarm_in_a_project(look, project):
    assert look(project) == {}


def test_no_false_alarm_in_a_script(look):
    assert look(PROJECT) == {}


def test_a_patch_in_the_file_of_the_class_itself(look):
    found = look("""
    import functools
    class Net:
        def forward(self): return 1
        def other(self): return 1
    before = Net.forward
    @functools.wraps(before)
    def forward(self): return before(self) + 1
    Net.forward = forward
    def make():
        def other(self): return 2
        return other
    Net.other = make()
    """)
    assert set(found) == {"__main__.Net.forward", "__main__.Net.other"}
    assert found["__main__.Net.other"]["line"] == 11


def test_a_method_of_torch(look, tmp_path):
    found = look("""
    import torch
    def new_forward(self, x):
        return x
    torch.nn.Linear.forward = new_forward
    """)
    assert found.keys() == {"torch.nn.modules.linear.Linear.forward"}
    told = found["torch.nn.modules.linear.Linear.forward"]
    assert told["kind"] == "replaced"
    assert told["by"] == "__main__.new_forward"
    assert told["module"] == "__main__"
    assert told["file"] == str(tmp_path / "train.py")
    assert told["line"] == 3
    assert "torch/nn/modules/linear.py:" in told["original"]


FOUND = """
torch.nn.Linear.forward = lambda self, x: x
    torch.nn.modules.linear.Linear.forward replaced
torch.nn.Module.__call__ = new
    torch.nn.modules.module.Module.__call__ replaced
torch.nn.Linear.__call__ = new
    torch.nn.modules.linear.Linear.__call__ overrides
torch.nn.functional.silu = new
    torch.nn.functional.silu replaced
torch.nn.functional.silu = torch.nn.functional.mish
    torch.nn.functional.silu replaced
torch.matmul = new
    torch.matmul replaced
torch.Tensor.add = new
    torch.Tensor.add overrides
torch.Tensor.mine = new
    torch.Tensor.mine added
torch.nn.functional.silu.__code__ = (lambda input, inplace=False: input).__code__
    torch.nn.functional.silu code
torch.optim.Adam.step = new
    torch.optim.adam.Adam.step replaced
torch.optim.Adam.step = mock.MagicMock()
    torch.optim.adam.Adam.step replaced
torch.nn.Linear.forward = functools.partialmethod(new)
    torch.nn.modules.linear.Linear.forward replaced
torch.nn.Linear.forward = functools.wraps(torch.nn.Linear.forward)(new)
    torch.nn.modules.linear.Linear.forward replaced
torch.nn.modules.normalization.LayerNorm = Own
    torch.nn.modules.normalization.LayerNorm replaced
torch.nn.Linear.from_nowhere = classmethod(new)
    torch.nn.modules.linear.Linear.from_nowhere added
numpy.mean = new
    numpy.mean replaced
builtins.sum = new
    builtins.sum replaced
math.sqrt = new
    math.sqrt replaced
configparser.RawConfigParser.read = new
    configparser.RawConfigParser.read replaced
textwrap.fill = new
    textwrap.fill replaced
project.plain = project.other
    project.plain replaced
project.plain = new
    project.plain replaced
project.relu = new
    project.relu replaced
project.Net.forward = new
    project.Net.forward replaced
project.Net.Inner.f = new
    project.Net.Inner.f replaced
project.Net._Net__hidden = new
    project.Net._Net__hidden replaced
project.Sub.forward = new
    project.Sub.forward overrides
project.Net = Own
    project.Net replaced
project.Net.forward = mock.MagicMock()
    project.Net.forward replaced
project.Net.forward = numpy.mean
    project.Net.forward replaced
Own.f = new
    __main__.Own.f replaced
""".strip().splitlines()


def test_what_is_found(python, project):
    """Each patch in a process of its own, forked from one that has imported everything."""
    patches = FOUND[::2]
    expected = [line.split() for line in FOUND[1::2]]
    out = python(
        """
        import builtins, configparser, functools, json, math, os, sys, textwrap, warnings
        from unittest import mock
        import numpy, torch, project
        from tensortap.provenance.modifications import Finder, Pace
        def new(*args, **kwargs): return args
        class Own:
            def f(self): return 1
        warm = Finder(pace=Pace(rest=0))
        assert warm.find() == {}
        for patch in json.loads(sys.argv[1]):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                exec(patch)
                found = {where: m.kind for where, m in warm.find().items()}
                print(json.dumps(found), flush=True)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, patch
        """,
        json.dumps(patches),
    )
    got = dict(zip(patches, [json.loads(line) for line in out.splitlines()], strict=True))
    assert got == {p: {where: kind} for p, (where, kind) in zip(patches, expected, strict=True)}


def test_hooks_that_python_offers_are_no_modifications(look):
    assert (
        look("""
    import sys, threading, warnings, logging
    def hook(*args, **kwargs): pass
    sys.excepthook = hook
    threading.excepthook = hook
    warnings.showwarning = hook
    logging.captureWarnings(True)
    """)
        == {}
    )


def test_a_patch_before_tensortap_was_imported(look, tmp_path):
    found = look("""
    import textwrap
    def mine(text, **options): return None
    textwrap.fill = mine
    import tensortap
    """)
    assert set(found) == {"textwrap.fill"}


def test_lazy_things_stay_asleep(look):
    assert (
        look("""
    import importlib.util, sys, types
    spec = importlib.util.find_spec("turtledemo")
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    lazy = importlib.util.module_from_spec(spec)
    sys.modules["turtledemo"] = lazy
    loader.exec_module(lazy)

    class Explosive(types.ModuleType):
        def __getattribute__(self, name): raise RuntimeError("woken up")
    sys.modules["explosive"] = Explosive("explosive")

    class Touchy(type):
        def __getattribute__(cls, name): raise RuntimeError("woken up")
    class Held(metaclass=Touchy):
        def f(self): return 1

    class Proxy:
        @property
        def __class__(self): raise RuntimeError("woken up")
        def __getattr__(self, name): raise RuntimeError("woken up")
        def __call__(self): raise RuntimeError("woken up")
    proxy = Proxy()
    sys.modules["not a module"] = proxy
    sys.modules["none"] = None
    before = set(sys.modules)
    from tensortap.provenance.modifications import find
    find()
    assert type(lazy).__name__ == "_LazyModule"
    """)
        == {}
    )


def test_no_source_can_be_asked(python):
    out = python("""
        import sys, textwrap
        def mine(text, **options): return None
        textwrap.fill = mine
        from tensortap.provenance.modifications import Finder
        executable, sys.executable = sys.executable, "/opt/some/program"
        finder = Finder()
        finder.find()
        print("no Python" in finder.problem)
        sys.executable = executable
        print(set(finder.find()), repr(finder.problem))
    """)
    assert out.splitlines() == ["True", "{'textwrap.fill'} ''"]


def test_it_works_in_small_slices(python):
    """The lock is given up after half a millisecond; gc of the test's own making aside."""
    out = python("""
        import gc, json, time
        import torch, numpy, jax
        from tensortap.provenance import pace
        from tensortap.provenance.modifications import Finder
        gc.collect(); gc.freeze()
        slices, began = [], time.thread_time()
        class Clock:
            perf_counter = staticmethod(time.perf_counter)
            @staticmethod
            def sleep(seconds):
                global began
                slices.append(time.thread_time() - began)
                time.sleep(seconds / 10)
                began = time.thread_time()
        pace.time = Clock
        start = time.thread_time()
        Finder(pace=pace.Pace()).find()
        slices.sort()
        print(json.dumps([time.thread_time() - start, slices[-1], slices[len(slices) * 99 // 100]]))
    """)
    total, worst, most = json.loads(out)
    assert total < 3.0  # seconds; 0.4 on an idle machine
    assert most < 0.002
    assert worst < 0.02  # 0.0013 on an idle machine
