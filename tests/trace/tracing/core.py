# ruff: noqa: B905, C416, F401, F841, F842, PT017, RET504  unused bindings are what is tested
"""Checks of the instrumentation that need only the standard library.

`test_core.py` runs them in this Python; as a program this file runs them in any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

if __name__ == "__main__":  # without importing the rest of tensortap
    for name in (
        "tensortap", "tensortap.capture", "tensortap.core", "tensortap.rooms",
        "tensortap.rooms.trace", "tensortap.values", "tensortap.values.torch",
    ):  # fmt: skip
        package = types.ModuleType(name)
        package.__path__ = [str(Path(sys.argv[1], *name.split(".")))]
        sys.modules[name] = package

from tensortap.rooms.trace.instrument import instrumented, listen, unlisten
from tensortap.rooms.trace.resolve import NoSource, Resolver, bound_names, unwrap
from tensortap.rooms.trace.rewrite import ProbeSpec


class Log:
    """A listener that records everything; calls are numbered."""

    def __init__(self):
        self.events = []
        self.calls = 0

    def call(self):
        self.calls += 1
        return LoggedCall(self, self.calls)

    def fault(self, error):
        raise error

    def of(self, name):
        return [event[2] for event in self.events if event[1] == name]


class LoggedCall:
    def __init__(self, log, number):
        self.log, self.number = log, number

    def bind(self, name, value, part):
        self.log.events.append((self.number, name if part is None else f"{name}/{part}", value))

    def result(self, value):
        self.log.events.append((self.number, "return", value))

    def fault(self, error):
        raise error


@contextlib.contextmanager
def logged(function, *names, this=None, results=False):
    log = Log()
    code = function.__code__
    listen(function, this, log, ProbeSpec(frozenset(names), results))
    try:
        yield log
    finally:
        unlisten(function, log)
    assert function.__code__ is code
    assert function not in instrumented()


# -- kinds of bindings --------------------------------------------------------------

counter = 0


def bindings(x, *rest, key=3, **more):
    """A docstring."""
    global counter
    counter = 7
    y = x + 1
    y += 2
    z: int = 5
    unset: int
    a, (b, *c) = 1, (2, 3, 4)
    for i in range(2):
        last = i
    with contextlib.nullcontext(5) as w, contextlib.nullcontext((6, 7)) as (u, v):
        pass
    try:
        raise ValueError("told")
    except ValueError as error:
        pass
    import collections.abc
    import os.path as place

    squares = [q * q for q in range(3) if q]
    pairs = {k: p for k, p in {"a": 1}.items()}
    if (walrus := 3) > 2:
        pass
    firsts = [(found := n) for n in (8, 9)]
    match [1, {"m": 2, "r": 3}]:
        case [first, {"m": second, **others}] if first:
            pass
    del y
    first = place and squares and firsts and last and (w, u, v, z, a, b, c)

    class Local:
        x = "an attribute, no local"

    return first


ALL = (
    "x rest key more counter y z a b c i w u v error place collections q k p walrus found first "
    "second others Local"
)


def check_reports_every_kind_of_binding():
    names = ALL.split()
    with logged(bindings, *names, results=True) as log:
        bindings(1, 2, other=4)
    assert log.of("x") == [1]
    assert log.of("rest") == [(2,)]
    assert log.of("key") == [3]
    assert log.of("more") == [{"other": 4}]
    assert log.of("counter") == [7]
    assert log.of("y") == [2, 4]
    assert log.of("z") == [5]
    assert (log.of("a"), log.of("b"), log.of("c")) == ([1], [2], [[3, 4]])
    assert log.of("i") == [0, 1]
    assert (log.of("w"), log.of("u"), log.of("v")) == ([5], [6], [7])
    assert [str(error) for error in log.of("error")] == ["told"]
    assert log.of("place") == [__import__("os").path]
    assert log.of("collections") == [__import__("collections")]
    assert log.of("q") == [0, 1, 2]
    assert (log.of("k"), log.of("p")) == (["a"], [1])
    assert log.of("walrus") == [3]
    assert log.of("found") == [8, 9]
    assert log.of("first")[0] == 1
    assert (log.of("second"), log.of("others")) == ([2], [{"r": 3}])
    assert [cls.__name__ for cls in log.of("Local")] == ["Local"]
    assert len(log.of("return")) == 1
    assert set(names) <= set(bound_names(bindings.__code__))
    assert "unset" not in bound_names(bindings.__code__)


def check_events_are_in_program_order():
    with logged(bindings, "x", "y", "i", results=True) as log:
        bindings(1)
    names = [name for _, name, _ in log.events]
    assert names == ["x", "y", "y", "i", "i", "return"]


def setting(self, out):
    self.count += 1
    self.child.value = 2
    out["a"] = 1
    out["b"]["c"] = 2
    which = "d"
    out[which] = 3
    self.pair, other = 1, 2
    return other


def check_reports_attributes_and_items():
    this = types.SimpleNamespace(count=0, child=types.SimpleNamespace())
    with logged(setting, "self", "out") as log:
        setting(this, {"b": {}})
    names = [name for _, name, _ in log.events]
    assert names == [
        "self", "out", "self/count", "self/child", "out/a", "out/b", "out/*", "self/pair",
    ]  # fmt: skip


# -- kinds of functions --------------------------------------------------------------------


def generator(n):
    """Yields."""
    for i in range(n):
        double = i * 2
        got = yield double
    return got


def check_generators():
    with logged(generator, "n", "double", "got", results=True) as log:
        running = generator(2)
        assert next(running) == 0
        assert running.send("sent") == 2
        assert list(running) == []
    assert log.events == [
        (1, "n", 2), (1, "double", 0), (1, "return", 0), (1, "got", "sent"), (1, "double", 2),
        (1, "return", 2), (1, "got", None),
    ]  # fmt: skip


def check_generator_that_outlives_the_listener():
    with logged(generator, "double") as log:
        running = generator(3)
        next(running)
    assert list(running) == [2, 4]
    assert log.of("double") == [0, 2, 4]  # it was entered while there was a listener


async def waiting(x):
    y = x + 1
    async with contextlib.AsyncExitStack() as stack:
        z = [i async for i in numbers()]
    return y, z, stack is None


async def numbers():
    for i in range(2):
        yield i


def check_async_functions():
    with logged(waiting, "y", "i", "z", "stack", results=True) as log:
        assert asyncio.run(waiting(1)) == (2, [0, 1], False)
    assert (log.of("y"), log.of("i"), log.of("z")) == ([2], [0, 1], [[0, 1]])
    assert len(log.of("stack")) == 1
    assert log.of("return") == [(2, [0, 1], False)]
    with logged(numbers, "i", results=True) as log:
        asyncio.run(waiting(1))
    assert log.of("i") == log.of("return") == [0, 1]


def recursive(n):
    m = n - 1
    below = recursive(m) if m else 0
    return below + 1


def check_recursive_calls_are_separate():
    with logged(recursive, "m", "below", results=True) as log:
        assert recursive(3) == 3
    assert [event for event in log.events if event[1] == "m"] == [
        (1, "m", 2), (2, "m", 1), (3, "m", 0),
    ]  # fmt: skip
    assert [event[0] for event in log.events if event[1] == "below"] == [3, 2, 1]


def closure(factor):
    def multiply(x):
        y = x * factor
        return y

    return multiply


def check_closures_keep_their_cells():
    twice, thrice = closure(2), closure(3)
    with logged(twice, "y") as log:
        assert (twice(5), thrice(5)) == (10, 15)
    assert log.of("y") == [10]  # the other closure is another function


def decorated(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        return function(*args, **kwargs)

    return around


class Base:
    def method(self, x):
        return x


class Kinds(Base):
    def method(this, x):
        y = super().method(x) + 1
        return y

    @staticmethod
    def static(x):
        y = x
        return y

    @classmethod
    def of_class(cls, x):
        y = (cls.__name__, x)
        return y

    @decorated
    @decorated
    def wrapped(self, x):
        y = x + 1
        return y

    @property
    def prop(self):
        y = 4
        return y

    def only_rest(*args):
        y = args[1]
        return y

    def __hidden(self, __x):
        __y = __x + 1
        return __y

    def call_hidden(self, x):
        return self.__hidden(x)

    later = functools.partialmethod(method, 5)


def check_methods_of_every_kind():
    one, other = Kinds(), Kinds()
    for name in "method static of_class wrapped only_rest".split():
        found = unwrap(Kinds.__dict__[name], one)
        with logged(found.function, "x", "y", this=found.this, results=True) as log:
            value = getattr(one, name)(3)
            getattr(other, name)(3)
        times = 2 if found.this is not one else 1  # a static method is shared by all objects
        assert log.of("y") == log.of("return") == [value] * times, name
    with logged(unwrap(Kinds.__dict__["prop"], one).function, "y", this=one) as log:
        assert one.prop == 4
    assert log.of("y") == [4]
    found = unwrap(Kinds.__dict__["later"], one)
    with logged(found.function, "x", this=one) as log:
        one.later()
    assert log.of("x") == [5]
    assert unwrap(len) is None


def check_private_names_are_unmangled():
    function = Kinds._Kinds__hidden
    one = Kinds()
    assert bound_names(function.__code__)[-2:] == ("__x", "__y")
    with logged(function, "__x", "__y", this=one) as log:
        assert one.call_hidden(1) == 2
    assert (log.of("__x"), log.of("__y")) == ([1], [2])


# -- no side effects ------------------------------------------------------------------


def looking(x):
    y = x
    return sorted(locals()), sorted(vars()), dir(), y


def check_locals_hides_our_variables():
    plainly = looking(1)
    with logged(looking, "x", "y", results=True):
        assert looking(1) == plainly


def raising(x):
    y = x
    if y:
        raise KeyError("as before")
    return y


def check_errors_and_line_numbers_are_unchanged():
    def where():
        try:
            raising(1)
        except KeyError as error:
            return [
                (f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__)
            ], error.args
        return None

    before = where()
    with logged(raising, "y", results=True) as log:
        assert where() == before
    assert log.events == [(1, "y", 1)]


def check_listeners_end_in_any_order():
    code = recursive.__code__
    logs = [Log(), Log(), Log()]
    wants = [
        ProbeSpec(frozenset({"m"})),
        ProbeSpec(frozenset({"n"}), True),
        ProbeSpec(frozenset({"below"})),
    ]
    for log, want in zip(logs, wants):
        listen(recursive, None, log, want)
    recursive(1)
    for index in (1, 0, 2):
        unlisten(recursive, logs[index])
        recursive(1)
    assert recursive.__code__ is code
    assert [len(log.of(name)) for log, name in zip(logs, ("m", "n", "below"))] == [2, 1, 3]


def check_one_object_of_a_class():
    one, two = Kinds(), Kinds()
    log, everything = Log(), Log()
    listen(Kinds.method, one, log, ProbeSpec(frozenset({"y"})))
    two.method(1)
    one.method(2)
    assert log.of("y") == [3]
    assert log.calls == 1  # calls on the other object never reach the listener
    listen(Kinds.method, None, everything, ProbeSpec(frozenset({"y"})))
    two.method(3)
    one.method(4)
    assert (log.of("y"), everything.of("y")) == ([3, 5], [4, 5])
    unlisten(Kinds.method, log)
    unlisten(Kinds.method, everything)


def check_existing_trace_function_sees_the_same_lines():
    def lines(function, *args):
        seen = []

        def on_event(frame, event, arg):
            if frame.f_code.co_name == function.__name__:
                if event in ("call", "return") or not seen or seen[-1] != (event, frame.f_lineno):
                    seen.append((event, frame.f_lineno))
                return on_event
            return None

        before = sys.gettrace()
        sys.settrace(on_event)
        try:
            function(*args)
        finally:
            assert sys.gettrace() is on_event
            sys.settrace(before)
        return seen

    plainly = {line for _, line in lines(bindings, 1)}
    with logged(bindings, "y", "i", "first", results=True) as log:
        assert {line for _, line in lines(bindings, 1)} == plainly
    assert log.of("y") == [2, 4]


def check_threads():
    with logged(recursive, "m") as log:
        threads = [threading.Thread(target=recursive, args=(50,)) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len(log.of("m")) == 400


def check_functions_are_not_kept_alive():
    import gc
    import weakref

    function = closure(2)
    with logged(function, "y"):
        function(1)
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None


# -- without source ------------------------------------------------------------------------


def raises_no_source(function, reason):
    try:
        listen(function, None, Log(), ProbeSpec(frozenset("y")))
    except NoSource as error:
        assert reason in str(error)
    else:
        raise AssertionError("no error without source")


def check_edited_source():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "module.py")
        path.write_text("def f(x):\n    y = x + 1\n    return y\n")
        names = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        path.write_text("def f(x):\n    y = x + 2\n    return y\n# changed since\n")
        raises_no_source(names["f"], "has been edited since it was loaded")


def check_source_without_a_file():
    text = "def cell(x):\n    y = [x for x in range(x)]\n    return y\n"
    name = "<cell 1>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)  # as notebooks do
    names = {}
    exec(compile(text, name, "exec"), names)
    with logged(names["cell"], "x", "y") as log:
        assert names["cell"](2) == [0, 1]
    assert log.events == [(1, "x", 2), (1, "x", 0), (1, "x", 1), (1, "y", [0, 1])]


# -- paths ---------------------------------------------------------------------------------


def shared(z):
    w = z + 1
    return w


class Leaf:
    def forward(me, x):
        scores = x * 2
        return scores


class Tree:
    def __init__(self):
        self.leaves = {"0": Leaf(), "1": Leaf()}
        self.one = Leaf()

    def forward(self, x):
        def nested(t):
            return t

        out = {"logits": nested(shared(x))}
        return out


def children(owner):
    return {**owner.leaves, "one": owner.one} if isinstance(owner, Tree) else {}


def check_path_resolution():
    tree = Tree()
    resolver = Resolver(tree, children)

    def keys(*segments):
        return sorted(".".join((*p.path, *p.inside)) for p in resolver.resolve(segments)[0])

    assert keys("forward") == ["forward"]
    assert keys("forward", "x") == ["forward.x"]
    assert keys("0") == ["0"]
    assert keys("*", "forward", "scores") == [f"{i}.forward.scores" for i in ("0", "1", "one")]
    assert keys("*", "*", "scores") == keys("*", "forward", "scores")
    assert keys("forward", "out", "logits") == ["forward.out.logits"]
    # `self` is left out: copying it would copy the whole object
    assert keys("forward", "*") == ["forward.nested", "forward.out", "forward.x"]
    assert keys("forward", "self") == ["forward.self"]
    assert "forward.self.one" in keys("forward", "*", "one")
    assert keys("*") == ["0", "1", "forward", "one"]  # no __init__
    assert keys("__init__", "self") == ["__init__.self"]
    assert "To trace what it calls: tap.trace(" in (resolver.resolve(("forward", "shared", "w"))[1])
    assert keys("forward", "return", "logits") == ["forward.return.logits"]
    assert resolver.resolve(("0", "forward", "score"))[1] == (
        "no local 'score' in 0.forward; it has 'scores', 'me', 'x'"
    )
    assert resolver.resolve(("one", "forwards", "x"))[1] == (
        "no module or method 'forwards' in one; it has 'forward'"
    )
    tree.one.scale = 2
    assert resolver.resolve(("one", "scale"))[1] == (
        "one.scale is a value, not a function: its value at each call is 'one.forward.me.scale'"
    )
    assert Resolver(len, lambda owner: {}).resolve(("x",))[1] == (
        "<built-in function len> is not written in Python, so it has no locals"
    )
    assert "it has 'forward'" in resolver.resolve(("forwards",))[1]
    assert "is not a function" in resolver.resolve(("__class__", "x"))[1]
    probes, _ = Resolver(shared, lambda owner: {}).resolve(("w",))
    assert [probe.path for probe in probes] == [("w",)]
    assert Resolver(shared, lambda owner: {}).resolve(("v",))[1] == (
        "no local 'v' in shared; it has 'z', 'w'"
    )


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    for check in CHECKS:
        check()
    assert "numpy" not in sys.modules, "the instrumentation must import only the standard library"
    print(f"{len(CHECKS)} checks on {sys.version.split()[0]}")
