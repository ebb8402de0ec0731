"""`trace` without a framework: paths, selection, results, callbacks, messages and records."""

from __future__ import annotations

import collections
import dataclasses
import linecache
import logging
import re
import threading

import numpy as np
import pytest

import tensortap as tap
from tensortap.capture.pipeline import pipeline
from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind

pytestmark = pytest.mark.usefixtures("no_errors")


def values(tracer, path):
    return tracer.results[path].values


def mean(xs, scale=1.0):
    total = 0.0
    for x in xs:
        total = total + x
    result = total / len(xs) * scale
    return result  # noqa: RET504  the binding is traced


# -- plain functions and objects -----------------------------------------------------------


def test_plain_function():
    with tap.trace(mean, ["xs", "total", "return", "scale", "xs.1"]) as tracer:
        assert mean([1.0, 2.0]) == 1.5
        assert mean([3.0, 5.0]) == 4.0
    assert values(tracer, "xs") == [[1.0, 2.0], [3.0, 5.0]]
    assert values(tracer, "total") == [0.0, 1.0, 3.0, 0.0, 3.0, 8.0]
    assert tracer.results["total"].iterations == [0, 0, 0, 1, 1, 1]
    assert tracer.results["total"].ranks == [0] * 6
    assert values(tracer, "return") == [1.5, 4.0]
    assert values(tracer, "xs.1") == [2.0, 5.0]
    assert values(tracer, "scale") == [1.0]  # unchanged in the second call


class Trainer:
    def __init__(self):
        self.parts = [Part(), Part()]
        self.losses = []

    def step(me, batch):
        loss = sum(batch)
        me.losses.append(loss)
        return {"loss": loss, "parts": [part.run(loss) for part in me.parts]}

    def evaluate(self):
        accuracy = 0.5
        return accuracy  # noqa: RET504


class Part:
    def run(self, x):
        double = 2 * x
        return double  # noqa: RET504


def test_methods_of_an_object_count_their_own_calls():
    trainer, other = Trainer(), Trainer()
    paths = [
        "step.loss",
        "evaluate.accuracy",
        "step.return.parts.*",
        "parts.1.run.double",
        "parts.*.run",
    ]
    with tap.trace(trainer, paths, changed=False) as tracer:
        for i in range(3):
            trainer.step([i, 1])
            other.step([7, 7])
        trainer.evaluate()
    assert values(tracer, "step.loss") == [1, 2, 3]
    assert tracer.results["step.loss"].iterations == [0, 1, 2]
    assert tracer.results["evaluate.accuracy"].iterations == [0]
    assert values(tracer, "step.return.parts.0") == [2, 4, 6]
    assert values(tracer, "parts.1.run.double") == [2, 4, 6]
    assert values(tracer, "parts.0.run") == [2, 4, 6]


def test_class_is_traced_on_all_its_objects():
    with tap.trace(Trainer, ["step.loss", "*.accuracy"]) as tracer:
        Trainer().step([1])
        Trainer().step([2])
        Trainer().evaluate()
    assert values(tracer, "step.loss") == [1, 2]
    assert values(tracer, "evaluate.accuracy") == [0.5]


def test_bound_method_is_traced_only_on_its_object():
    one, two = Trainer(), Trainer()
    with tap.trace(one.step, ["loss"]) as tracer:
        two.step([9])
        one.step([1])
    assert values(tracer, "loss") == [1]


def test_tracer_can_be_entered_again():
    tracer = tap.trace(mean, "total")
    mean([1.0])
    with tracer:
        mean([2.0])
    mean([3.0])
    with tracer:
        mean([4.0])
    assert values(tracer, "total") == [0.0, 2.0, 0.0, 4.0]
    assert tracer.results["total"].iterations == [0, 0, 0, 0]
    with tracer, pytest.raises(RuntimeError, match="already entered"):
        tracer.__enter__()


# -- rebinding, change, every --------------------------------------------------------------


def keeps(x):
    y = x
    return y  # noqa: RET504


@pytest.mark.parametrize(
    ("first", "same", "other"),
    [
        (np.arange(3), np.arange(3), np.arange(3.0)),
        (1, 1, True),
        ([1, [2]], [1, [2]], (1, [2])),
        ({"a": np.nan}, {"a": np.nan}, {"a": 0.0}),
        (0.0, 0.0, -0.0),
    ],
)
def test_changed_compares_content_and_type(first, same, other):
    with tap.trace(keeps, ["y"]) as tracer:
        for value in (first, same, other, same):
            keeps(value)
    assert tracer.results["y"].iterations == [0, 2, 3]
    with tap.trace(keeps, ["y"], changed=False) as tracer:
        for value in (first, same, other):
            keeps(value)
    assert tracer.results["y"].iterations == [0, 1, 2]


class Box:
    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "a box"


def test_values_that_cannot_be_compared_count_as_changed():
    lock = threading.Lock()
    with tap.trace(keeps, ["y"]) as tracer:
        for value in (1, lock, 1, 1, lock, lock):
            keeps(value)
    assert tracer.results["y"].iterations == [0, 1, 2, 4, 5]
    box = Box([1])
    with tap.trace(keeps, ["y", "y.value"]) as tracer:
        keeps(box)
        keeps(box)
        box.value.append(2)
        keeps(box)
    assert [one.value for one in values(tracer, "y")] == [[1], [1], [1, 2]]
    assert tracer.results["y.value"].iterations == [0, 2]


def test_overlapping_paths_keep_each_value_once():
    with tap.trace(
        mean, ["total", "*", "return", "total", "xs.0", "xs.*"], changed=False
    ) as tracer:
        mean([1.0, 2.0])
    assert values(tracer, "total") == [0.0, 1.0, 3.0]
    assert values(tracer, "xs.0") == [1.0]
    assert values(tracer, "return") == [1.5]


def test_every_nth_iteration():
    with tap.trace(keeps, ["y"], every=3) as tracer:
        for i in range(8):
            keeps(i)
    assert values(tracer, "y") == tracer.results["y"].iterations == [0, 3, 6]


def test_disable_stops_tracing():
    with tap.trace(keeps, ["y"]) as tracer:
        keeps(0)
        tap.enable(False)
        try:
            keeps(1)
        finally:
            tap.enable()
        keeps(2)
    assert values(tracer, "y") == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"gathering_interval": 0}, "gathering_interval must be at least 1, got 0"),
        ({"mode": "test"}, "mode must be 'train', 'eval' or 'both', got 'test'"),
    ],
)
def test_rejects_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        tap.trace(keeps, ["y"], **options)


def test_rejects_invalid_paths():
    with pytest.raises(ValueError, match=r"'a\.\.b' is not a path"):
        tap.trace(keeps, ["a..b"])
    with pytest.raises(TypeError, match="a path must be a string"):
        tap.trace(keeps, [3])


# -- what is kept --------------------------------------------------------------------------


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Output:
    logits: object
    parts: dict


def test_paths_into_values():
    value = Output(np.ones(2), {"p": Point(1, [10, 20]), 3: "three", "a.b": "dotted"})
    paths = [
        "y.logits", "y.parts.p.x", "y.parts.p.y.1", "y.parts.p.y.-1", "y.parts.3", "y.parts.'a.b'",
        "y.parts.p.*", "x.*.p.x", "y.logits.0", "y.logits.shape",
    ]  # fmt: skip
    with tap.trace(keeps, paths) as tracer:
        keeps(value)
    assert np.array_equal(values(tracer, "y.logits")[0], np.ones(2))
    assert values(tracer, "y.parts.p.x") == [1]
    assert values(tracer, "y.parts.p.y.1") == values(tracer, "y.parts.p.y.-1") == [20]
    assert values(tracer, "y.parts.3") == ["three"]
    assert values(tracer, "y.parts.'a.b'") == ["dotted"]
    assert values(tracer, "y.parts.p.y") == [[10, 20]]
    assert values(tracer, "x.parts.p.x") == [1]
    assert values(tracer, "y.logits.0") == [1.0]
    assert values(tracer, "y.logits.shape") == [(2,)]


def test_keeps_copies():
    def changes(x):
        y = {"array": x, "list": [x]}
        x += 1
        y["list"].append(2)

    x = np.zeros(2)
    with tap.trace(changes, ["x", "y"]) as tracer:
        changes(x)
    assert values(tracer, "x")[0].tolist() == [0, 0]
    assert values(tracer, "x")[1].tolist() == [1, 1]  # `x += 1` binds x again
    assert values(tracer, "y")[0]["array"].tolist() == [0, 0]
    assert len(values(tracer, "y")[0]["list"]) == 1


def test_functions_are_not_copied():
    # a copy would copy its globals
    with tap.trace(keeps, ["y"]) as tracer:
        keeps(mean)
        keeps(logging)
    assert values(tracer, "y")[0] is mean
    assert values(tracer, "y")[1].type == "builtins.module"


def test_pre_save_callbacks_change_and_discard_values():
    seen = []

    def odd(name, value):
        seen.append(name)
        return value if value % 2 else None

    with tap.trace(
        keeps, ["y"], pre_save_callbacks=[odd, lambda name, value: value * 10]
    ) as tracer:
        for i in range(4):
            keeps(i)
    assert values(tracer, "y") == [10, 30]
    assert tracer.results["y"].iterations == [1, 3]
    assert seen == ["y"] * 4


# -- gathering, in one process -------------------------------------------------------------


def stack(name, values, iterations, ranks):
    values[:] = [np.stack(values)]
    iterations[:] = [iterations[0]]
    ranks[:] = [ranks[0]]


def test_gathers_every_interval_and_the_rest_at_the_end():
    moments = []

    def note(name, values, iterations, ranks):
        moments.append((list(iterations), list(ranks)))

    with tap.trace(
        keeps, ["y"], gathering_interval=4, pre_gather_callbacks=[note, stack],
        post_gather_callbacks=[stack],
    ) as tracer:  # fmt: skip
        for i in range(10):
            keeps(np.full(2, i))
            assert len(values(tracer, "y")) == (i // 4)
    assert moments == [([0, 1, 2, 3], [0] * 4), ([4, 5, 6, 7], [0] * 4), ([8, 9], [0] * 2)]
    assert [one.shape for one in values(tracer, "y")] == [(1, 4, 2), (1, 4, 2), (1, 2, 2)]
    assert tracer.results["y"].iterations == [0, 4, 8]


def test_callback_that_empties_the_lists_is_closed():
    class Saver:
        kept = ()
        closed = 0

        def __call__(self, name, values, iterations, ranks):
            self.kept += tuple(values)
            for one in (values, iterations, ranks):
                one.clear()

        def close(self):
            self.closed += 1

    saver = Saver()
    with tap.trace(keeps, ["y"], gathering_interval=2, post_gather_callbacks=[saver]) as tracer:
        for i in range(5):
            keeps(i)
    assert saver.kept == (0, 1, 2, 3, 4)
    assert saver.closed == 1
    assert values(tracer, "y") == tracer.results["y"].iterations == []


def test_callbacks_change_the_lists():
    def odd(name, values, iterations, ranks):
        kept = [i for i, value in enumerate(values) if value % 2]
        for one in (values, iterations, ranks):
            one[:] = [one[i] for i in kept]

    def traced(**callbacks):
        with tap.trace(counts_up, ["y"], gathering_interval=1, **callbacks) as tracer:
            counts_up()
        return tracer.results["y"]

    assert traced(pre_gather_callbacks=odd).values == [1, 3]  # a single callback needs no list
    stack = tap.rooms.trace.stack_padded_tensors
    twice = traced(pre_gather_callbacks=[stack], post_gather_callbacks=[stack])
    assert twice.iterations == [[[0, 0, 0, 0]]]


def counts_up():
    y = 0
    y += 1
    y += 1
    y += 1
    return y


# -- messages --------------------------------------------------------------------------


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def sometimes(x):
    if x:
        y = x
        return y  # noqa: RET504
    return None


def test_reports_paths_that_match_nothing_once_with_alternatives(caplog):
    with caplog.at_level(logging.WARNING, "tensortap"):
        tracer = tap.trace(mean, ["totals", "result.parts", "scale"])
        for _ in range(2):
            with tracer:
                mean([1.0])
        with tap.trace(keeps, ["y.logit"]):
            keeps({"logits": 1, "loss": 2})
        with tap.trace(sometimes, ["y"]):
            sometimes(0)
        with tap.trace(sometimes, ["x"]):
            pass
    logged = messages(caplog)
    assert len(logged) == 5
    assert "no local 'totals' in mean; it has 'total', 'xs'" in logged[0]
    assert "no value was kept for 'result.parts'" in logged[1]
    assert "no 'logit' in y; it has 'logits', 'loss'" in logged[2]
    assert "called 1 times and never bound 'y'" in logged[3]
    assert "never called" in logged[4]
    with pytest.raises(KeyError, match="nothing was traced as 'totals'; it has 'scale'"):
        tracer.results["totals"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "mean was called 2 times, but capturing was off, or"),
        ({"mode": "eval"}, "or every= and mode= selected no"),
    ],
)
def test_reports_calls_that_were_not_traced_and_why(options, why, caplog):
    if not options:
        tap.enable(False)
    try:
        with caplog.at_level(logging.WARNING, "tensortap"), tap.trace(mean, ["total"], **options):
            mean([1.0])
            mean([2.0])
    finally:
        tap.enable()
    assert re.search(why, messages(caplog)[0])


def test_self_stands_for_the_first_argument_of_a_method():
    trainer = Trainer()
    with tap.trace(trainer, ["step.self.losses", "step.me.losses"]) as tracer:
        trainer.step([1.0, 2.0])
    assert values(tracer, "step.self.losses") == values(tracer, "step.me.losses") != []


def test_traced_function_can_be_pickled_by_value():
    import cloudpickle

    names = {"__name__": "__main__"}
    exec(compile(SENT, SENT_FILE, "exec"), names)
    with tap.trace(one := names["Sent"](), ["method.y"]) as tracer:
        data = cloudpickle.dumps(names["Sent"])
        one.method(2)
    assert cloudpickle.loads(data)().method(1) == 2
    assert values(tracer, "method.y") == [3]


SENT = "class Sent:\n    def method(self, x):\n        y = x + 1\n        return y\n"
SENT_FILE = "<sent>"
linecache.cache[SENT_FILE] = (len(SENT), None, SENT.splitlines(True), SENT_FILE)


def test_function_without_source(caplog):
    names = {}
    exec("def made(x):\n    y = x\n    return y", names)
    reason = "cannot trace 'y': the source of made is needed, but <string> has no source"
    code = names["made"].__code__
    with pytest.raises(TensortapError, match=reason), tap.trace(names["made"], ["y"]):
        pass
    assert names["made"].__code__ is code
    with caplog.at_level(logging.WARNING, "tensortap"), tap.trace(names["made"], ["*"]):
        names["made"](1)
    assert messages(caplog)[0].endswith("the source of made is needed, but <string> has no source")


# -- records -------------------------------------------------------------------------------


@pytest.mark.slow
def test_records_in_a_run(open_run):
    with tap.trace(mean, ["total", "xs"]) as tracer:
        mean([1.0, 2.0])
        mean([4.0])
    with tap.trace(keeps, ["y"], changed=False, results=False) as nothing:
        for step in range(2):
            tap.step(step + 10)
            keeps(1)
            keeps(Box([1]))
    assert values(nothing, "y") == []
    tap.flush()
    run = tap.open(open_run)
    records = [r for r in run.records() if r.name == "mean.total"]
    assert {r.kind for r in records} == {Kind.LOCAL}
    assert [(r.step, r.call) for r in records] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert run.get_all("mean.total") == values(tracer, "total")
    assert run.get("mean.xs", step=0) == [1.0, 2.0]
    assert records[0].tags["mode"] == "train"
    with_clock = [r for r in run.records() if r.name == "keeps.y"]
    assert [(r.step, r.call) for r in with_clock] == [(10, 0), (10, 1), (11, 0), (11, 1)]
    assert run.get("keeps.y", step=11).type.endswith("Box")


@pytest.mark.slow
def test_values_that_no_record_can_hold_are_type_and_repr_in_a_run(open_run):
    ring = [1]
    ring.append(ring)
    with tap.trace(keeps, ["y"]):
        keeps(ring)
        keeps(threading.Lock())
    tap.flush()
    run = tap.open(open_run)
    assert run.get("keeps.y", step=0).type == "builtins.list"
    assert [r.type for r in run.records()] == ["builtins.list", "_thread.lock"]


@pytest.mark.slow
def test_receipt_counts_traced_values(open_run):
    before = pipeline.receipt()
    with tap.trace(keeps, ["y"]):
        for i in range(3):
            keeps(np.full(4, i))
            tap.catch(i, "seldom", every=3)
    spent = pipeline.receipt().since(before)
    assert (spent.captured, spent.tracked, spent.skipped) == (4, 0, 2)
    assert spent.bytes >= 3 * 32


class TestFaults:
    """Errors are counted and logged, and training goes on."""

    @pytest.fixture(autouse=True)
    def no_errors(self):
        """These tests expect errors."""

    @pytest.mark.parametrize("moment", ["pre_save", "pre_gather", "post_gather", "post_trace"])
    def test_callback_that_raises(self, moment, caplog, errors):
        def broken(*args):
            raise ZeroDivisionError("on purpose")

        broken.__name__ = f"broken_{moment}"
        with (
            caplog.at_level(logging.WARNING, "tensortap"),
            tap.trace(
                keeps, ["y"], gathering_interval=2, **{f"{moment}_callbacks": [broken]}
            ) as tracer,
        ):
            for i in range(4):
                keeps(i)
        assert values(tracer, "y") == [0, 1, 2, 3]
        assert errors() >= 1
        (logged,) = messages(caplog)
        assert f"'broken_{moment}(y)' failed: ZeroDivisionError: on purpose" in logged

    def test_callback_that_changes_only_one_list(self, caplog):
        def shrink(name, values, iterations, ranks):
            values[:] = values[:1]

        with (
            caplog.at_level(logging.WARNING, "tensortap"),
            tap.trace(keeps, ["y"], gathering_interval=2, post_gather_callbacks=[shrink]),
        ):
            for i in range(4):
                keeps(i)
        (logged,) = messages(caplog)
        assert "'shrink(y)' failed" in logged
        assert "it has left 1 values, 2 iterations and 2 ranks" in logged

    def test_strict_mode_raises_after_gathering(self, monkeypatch):
        monkeypatch.setattr(pipeline, "strict", True)

        def broken(name, values, iterations, ranks):
            raise ZeroDivisionError("on purpose")

        gathered = []
        tracer = tap.trace(
            keeps, ["y"], gathering_interval=2, pre_gather_callbacks=[broken],
            post_gather_callbacks=[lambda name, values, *_: gathered.extend(values)],
        )  # fmt: skip

        def train():
            with tracer:
                for i in range(4):
                    keeps(i)

        with pytest.raises(ZeroDivisionError):
            train()
        assert gathered[:2] == [0, 1]

    def test_error_of_the_user_comes_first(self):
        def callback(*args):
            raise ZeroDivisionError("of a callback")

        def fails(x):
            y = x
            raise KeyError(y)

        tracer = tap.trace(fails, ["y"], post_trace_callbacks=[callback])
        with pytest.raises(KeyError), tracer:
            fails(1)
        assert values(tracer, "y") == [1]

    def test_attribute_that_raises(self, errors):
        class Rude:
            @property
            def part(self):
                raise RuntimeError("on purpose")

        with tap.trace(keeps, ["y.part", "x"]) as tracer:
            keeps(Rude())
        assert errors() >= 1
        assert len(values(tracer, "x")) == 1
