"""Alerts: what each rule reports, the origin of a NaN, and that nothing is reported twice."""

from __future__ import annotations

import math
import sys

import msgspec
import numpy as np
import pytest

import tensortap as tap
from tensortap import alerts
from tensortap.alerts import AlertMonitor, alert_of, record_of
from tensortap.core.record import Kind, Record
from tensortap.runs.reader import find_all
from tensortap.stats import summarize_array
from tests.logframe.test_logframe import kept

FINE = np.array([0.5, -1.0, 2.0, 0.25, 0.0, 1.0, 3.0, -4.0], "float32")
BAD = np.array([0.5, math.nan, 2.0, math.nan], "float32")
HUGE = np.array([1.0, math.inf], "float32")


def tensor(name, values, step=0, kind=Kind.ACTIVATION, *, seq=0, rank=0, call=0, dtype="float32",
           tags=None) -> Record:  # fmt: skip
    stats = summarize_array(np.asarray(values).astype(np.dtype(dtype)))
    return Record(
        name, kind, step, call, seq, rank, 1, 0, "torch.nn.Linear", dtype, stats=stats,
        tags=tags or {},
    )  # fmt: skip


def metric(value, step, name="loss") -> Record:
    return Record(name, Kind.METRIC, step, 0, step, 0, 1, 0, value=value)


def shown(monitor: AlertMonitor, *records: Record) -> list[alerts.Alert]:
    return [alert for record in records for alert in monitor.see(record)]


# -- the origin of non-finite values --------------------------------------------------------


@pytest.mark.slow
def test_names_the_module_that_made_nan_from_finite_inputs():
    found = shown(
        AlertMonitor(),
        tensor("embed", FINE), tensor("blocks.0", FINE), tensor("blocks.1.attn", BAD),
        tensor("blocks.1", BAD), tensor("head", BAD),
        tensor("head", BAD, kind=Kind.GRADIENT),
        tensor("head.weight", BAD, kind=Kind.WEIGHT_GRADIENT),
        tensor("head.weight", BAD, kind=Kind.WEIGHT),
        metric(math.nan, 0),
    )  # fmt: skip
    (alert,) = found
    assert (alert.rule, alert.name, alert.kind) == ("nan", "blocks.1.attn", Kind.ACTIVATION)
    assert (alert.module, alert.origin) == ("blocks.1.attn", "blocks.1.attn")
    assert alert.facts == {"found": 2, "count": 4}
    assert "2 of 4 values are NaN, the first in this step; all 2 outputs before" in alert.message
    assert "its weights have not been observed yet" in alert.message


def test_suspects_the_batch_if_the_first_output_is_bad():
    (alert,) = shown(AlertMonitor(), tensor("embed", BAD))
    assert "no output came before it, check the batch as well" in alert.message


def test_forgets_the_outputs_of_the_previous_step():
    monitor = AlertMonitor()
    assert not shown(monitor, tensor("a", FINE, 0), tensor("b", FINE, 0))
    (alert,) = shown(monitor, tensor("a", BAD, 1), tensor("b", BAD, 1))
    assert alert.name == "a"
    assert "no output came before it" in alert.message


def test_names_the_module_whose_backward_made_a_bad_gradient():
    (alert,) = shown(
        AlertMonitor(),
        *(tensor(n, FINE) for n in ("net.0", "net.1", "net.2", "net")),
        tensor("net.2", FINE, kind=Kind.GRADIENT), tensor("net", FINE, kind=Kind.GRADIENT),
        tensor("net.1", BAD, kind=Kind.GRADIENT), tensor("net.0", BAD, kind=Kind.GRADIENT),
    )  # fmt: skip
    assert (alert.name, alert.kind) == ("net.1", Kind.GRADIENT)
    assert alert.origin == "net.2"  # its backward got a finite gradient; net only encloses it
    (alert,) = shown(AlertMonitor(), tensor("net.2", BAD, kind=Kind.GRADIENT))
    assert "check the loss" in alert.message


def test_names_the_module_of_a_lone_bad_weight_gradient():
    (alert,) = shown(
        AlertMonitor(),
        tensor("fc", FINE), tensor("fc", FINE, kind=Kind.GRADIENT),
        tensor("fc.weight", BAD, kind=Kind.WEIGHT_GRADIENT),
    )  # fmt: skip
    assert (alert.module, alert.origin) == ("fc", "fc")
    assert "so it arises in fc" in alert.message


def test_reports_a_bad_weight_but_not_what_follows_from_it():
    monitor = AlertMonitor()
    (alert,) = shown(monitor, tensor("fc.weight", BAD, 0, Kind.WEIGHT))
    assert "it was so when it was first observed" in alert.message
    after = [tensor("embed", FINE, 1), tensor("fc", BAD, 1), tensor("head", BAD, 1)]
    assert not shown(monitor, *after)
    assert monitor.followed == 2
    # a NaN after the weight has recovered is a new problem
    shown(monitor, tensor("fc.weight", FINE, 1, Kind.WEIGHT))
    assert [a.name for a in shown(monitor, tensor("embed", FINE, 2), tensor("fc", BAD, 2))] == [
        "fc"
    ]


def test_blames_the_update_for_a_weight_that_was_finite_before():
    monitor = AlertMonitor()
    shown(monitor, tensor("fc.weight", FINE, 0, Kind.WEIGHT))
    (alert,) = shown(monitor, tensor("fc.weight", BAD, 1, Kind.WEIGHT))
    assert "the update made it" in alert.message


def test_names_an_infinity_before_a_nan():
    found = shown(AlertMonitor(), tensor("a", FINE), tensor("scores", HUGE), tensor("softmax", BAD))
    assert [(a.rule, a.name, a.origin) for a in found] == [
        ("inf", "scores", "scores"), ("nan", "softmax", "scores"),
    ]  # fmt: skip
    assert "scores (Activation) had Inf before it" in found[1].message


MASKED = np.array([0.5, -math.inf, 2.0, -math.inf], "float32")


def test_ignores_masks():
    monitor = AlertMonitor()
    step = [tensor("scores", FINE), tensor("mask", MASKED), tensor("softmax", FINE)]
    assert not shown(monitor, *step, tensor("head", FINE), metric(1.0, 0))
    (alert,) = shown(monitor, *step, tensor("head", BAD), metric(math.nan, 0))
    assert (alert.rule, alert.name, alert.origin) == ("nan", "head", "head")
    assert "outputs before it were finite, 2 more had -Inf as masks do" in alert.message
    both = np.array(
        [math.nan, -math.inf], "float32"
    )  # a mask applied to values that were already NaN
    assert not shown(monitor, tensor("mask", both))


def test_names_the_mask_before_a_non_finite_value():
    names_and_values = [
        ("a", FINE),
        ("log", MASKED),
        ("wrap", MASKED),
        ("times", BAD),
        ("head", BAD),
    ]
    (alert,) = shown(AlertMonitor(), *(tensor(name, value) for name, value in names_and_values))
    assert (alert.rule, alert.name, alert.origin) == ("nan", "times", "log")
    (alert,) = shown(AlertMonitor(), tensor("a", FINE), tensor("log", MASKED), metric(math.inf, 0))
    assert (alert.rule, alert.name, alert.origin) == ("inf", "loss", "log")
    # rows of a softmax that are masked completely
    (alert,) = shown(AlertMonitor(), tensor("mask", MASKED), tensor("softmax", BAD))
    assert (alert.name, alert.origin) == ("softmax", "mask")


def test_reports_minus_infinity_that_is_no_mask():
    for kind in (Kind.GRADIENT, Kind.WEIGHT, Kind.OPTIMISER_STATE):
        (alert,) = shown(AlertMonitor([alerts.inf()]), tensor("w", MASKED, kind=kind))
        assert alert.rule == "inf"
    both = np.array([math.inf, -math.inf], "float32")
    assert len(shown(AlertMonitor([alerts.inf()]), tensor("a", both))) == 1


def test_monitors_ranks_separately():
    found = shown(AlertMonitor(), tensor("a", BAD, rank=0), tensor("b", BAD, rank=1))
    assert [(a.name, a.rank) for a in found] == [("a", 0), ("b", 1)]


# -- repeated problems ---------------------------------------------------------------------


def test_reports_once_until_the_problem_has_gone_and_returned():
    monitor = AlertMonitor([alerts.nan()])
    steps = [BAD, BAD, BAD, FINE, FINE, BAD, BAD]
    found = [len(monitor.see(tensor("a", v, i * 10))) for i, v in enumerate(steps)]
    assert found == [1, 0, 0, 0, 0, 1, 0]
    assert monitor.alerts[-1].again == 2


def test_reports_one_bad_call_of_many_once():
    monitor = AlertMonitor([alerts.nan()])
    found = [
        len(monitor.see(tensor("shared", BAD if call == 1 else FINE, step, call=call)))
        for step in range(4)
        for call in range(3)
    ]
    assert sum(found) == 1


def test_ignores_recomputed_tensors_and_alerts():
    monitor = AlertMonitor()
    assert monitor.see(tensor("a", BAD, tags={"recompute": "1"})) == []
    assert monitor.see(tensor("a", BAD, kind=Kind.ALERT)) == []


def test_distinguishes_the_optimizer_states_of_a_parameter():
    monitor = AlertMonitor([alerts.saturated()])
    top = np.array([3e38], "float32")
    states = [tensor("w", top, kind=Kind.OPTIMISER_STATE, tags={"state": s}) for s in ("mu", "nu")]
    assert len(shown(monitor, *states)) == 2


# -- the rules -----------------------------------------------------------------------------


def run_of(rule, sizes, kind=Kind.GRADIENT) -> list[int]:
    monitor = AlertMonitor([rule])
    return [
        step
        for step, size in enumerate(sizes)
        if monitor.see(tensor("fc", FINE * np.float32(size), step, kind))
    ]


def test_exploding():
    noise = 2.0 ** np.random.default_rng(0).normal(0, 1, 40)
    assert run_of(alerts.exploding(), noise) == []
    assert run_of(alerts.exploding(), [*noise[:20], 1000.0, *noise[20:]]) == [20]
    assert run_of(alerts.exploding(factor=10), [*noise[:20], 30.0]) == [20]
    assert run_of(alerts.exploding(), [1.0, 1e6]) == []  # no typical value yet
    assert run_of(alerts.exploding(warmup=1), [1.0, 1e6]) == [1]
    assert run_of(alerts.exploding(warmup=1), [1.0, 1e6], Kind.ACTIVATION) == []
    assert run_of(alerts.exploding(), [1.0] * 20 + [1000.0] * 200 + [1e6]) == [20, 220]


@pytest.mark.parametrize(("gap", "expected"), [(1, [15]), (50, [])])
def test_gradients_may_grow_between_looks_that_are_far_apart(gap, expected):
    monitor, found = AlertMonitor([alerts.exploding()]), []
    for look in range(20):
        size = np.float32(1e-6 if look < 15 else 1e-3)
        found += monitor.see(tensor("w", FINE * size, look * gap, Kind.WEIGHT_GRADIENT))
    assert [alert.step for alert in found] == expected


def test_vanishing_is_not_reported_where_something_is_not_finite():
    monitor = AlertMonitor()
    zero = np.zeros(8, "float32")
    for step in range(12):
        bad = step < 6
        shown(monitor, tensor("a", BAD if bad else FINE, step))
        shown(monitor, tensor("b", zero, step, Kind.GRADIENT))
    assert [(alert.rule, alert.name, alert.step) for alert in monitor.alerts] == [
        ("nan", "a", 0), ("vanishing", "b", 8),
    ]  # fmt: skip


def test_vanishing():
    noise = list(2.0 ** np.random.default_rng(0).normal(0, 1, 40))
    assert run_of(alerts.vanishing(), noise) == []
    assert run_of(alerts.vanishing(), [*noise, 1e-5, 1e-5, 1e-5, 1e-5]) == [42]
    assert run_of(alerts.vanishing(), [0.0] * 5) == [2]
    assert run_of(alerts.vanishing(patience=1), [1e-20]) == [0]
    assert run_of(alerts.vanishing(), [0.0, 1.0] * 5) == []
    monitor = AlertMonitor([alerts.vanishing()])  # of one value, that may well be 0
    for step in range(9):
        assert not monitor.see(tensor("fc", np.zeros(1, "float32"), step, Kind.GRADIENT))
    assert not AlertMonitor().see(tensor("fc", [math.nan], kind=Kind.GRADIENT))[1:]


def test_rounding_errors_do_not_vanish():
    for size, expected in ((1e-8, []), (1e-3, [42])):
        monitor, found = AlertMonitor([alerts.vanishing()]), []
        for step in range(50):
            monitor.see(tensor("weight", FINE, step, Kind.WEIGHT_GRADIENT))
            bias = FINE * np.float32(0 if step >= 40 else size)
            found += monitor.see(tensor("bias", bias, step, Kind.WEIGHT_GRADIENT))
        assert [alert.step for alert in found] == expected


def test_a_bias_without_influence_does_not_vanish():
    # as that of the keys in attention, which the softmax takes away
    for beside, expected in ((1.0, []), (1e-15, [2, 2])):
        monitor, found = AlertMonitor([alerts.vanishing()]), []
        for step in range(9):
            for name, size in (("key.bias", 1e-14), ("key.weight", beside)):
                values = FINE * np.float32(size)
                found += monitor.see(tensor(name, values, step, Kind.WEIGHT_GRADIENT))
        assert [alert.step for alert in found] == expected


def test_dead():
    zeros = np.zeros(100)
    zeros[:3] = 1
    monitor = AlertMonitor([alerts.dead()])
    found = [monitor.see(tensor("relu", zeros, step)) for step in range(4)]
    assert [len(f) for f in found] == [0, 0, 1, 0]
    assert found[2][0].message == (
        "97.0% of the output is zero, for 3 steps in a row; lower the learning rate, or use a "
        "leaky activation"
    )
    assert not shown(AlertMonitor([alerts.dead(share=0.98, patience=1)]), tensor("relu", zeros))
    assert not shown(AlertMonitor([alerts.dead(patience=1)]), tensor("loss", [0.0]))
    assert not shown(AlertMonitor([alerts.dead(patience=1)]), tensor("w", zeros, kind=Kind.WEIGHT))


def test_streaks_count_steps_not_calls():
    monitor = AlertMonitor([alerts.dead(), alerts.vanishing()])
    for kind in (Kind.ACTIVATION, Kind.GRADIENT):
        steps = [
            step
            for step in range(4)
            for call in range(5)
            if monitor.see(tensor("shared", np.zeros(8), step, kind, call=call))
        ]
        assert steps == [2]
    message = monitor.alerts[-1].message
    assert message == "gradient has been 0 for 3 steps in a row"


def test_saturated():
    values = np.array([448.0, 300.0, 1.0, 2.0] + [0.5] * 16)
    (alert,) = shown(AlertMonitor([alerts.saturated()]), tensor("q", values, dtype="float8_e4m3fn"))
    assert alert.facts == {"share": 0.1}
    assert "10.0% of the values have the largest exponent of float8_e4m3fn (2^8" in alert.message
    assert not shown(AlertMonitor([alerts.saturated()]), tensor("q", values, dtype="float32"))
    assert not shown(AlertMonitor([alerts.saturated()]), tensor("q", [2**31 - 1], dtype="int32"))
    assert not shown(
        AlertMonitor([alerts.saturated(share=0.2)]), tensor("q", values, dtype="float8_e4m3fn")
    )


def test_constant():
    (alert,) = shown(AlertMonitor(), tensor("gate", np.full(8, -0.5)))
    assert (alert.rule, alert.message) == ("constant", "all 8 finite values are -0.5")
    assert not shown(AlertMonitor(), tensor("gate", np.zeros(8)))
    assert not shown(AlertMonitor(), tensor("mean", [0.5]))
    # norm weights start as ones, and the gradient of a mean is constant
    ones = np.ones(8)
    assert not shown(AlertMonitor(), tensor("ln.weight", ones, kind=Kind.WEIGHT))
    assert not shown(AlertMonitor(), tensor("out", ones, kind=Kind.GRADIENT))
    monitor = AlertMonitor([alerts.constant(kinds=[Kind.WEIGHT])])
    assert shown(monitor, tensor("ln.weight", ones, kind=Kind.WEIGHT))


def test_loss_spike():
    rng = np.random.default_rng(0)
    losses = [5.0 * 0.99**i + 0.1 * float(rng.standard_normal()) for i in range(200)]

    def steps(values, **options):
        monitor = AlertMonitor([alerts.loss_spike(**options)])
        return [i for i, v in enumerate(values) if monitor.see(metric(v, i))]

    assert steps(losses) == []
    assert steps([*losses[:100], 12.0, *losses[100:]]) == [100]
    assert steps([*losses[:100], 12.0], rise=10.0) == []
    monitor = AlertMonitor([alerts.loss_spike()])
    assert not [v for i, v in enumerate([1.0] * 20 + [99.0]) if monitor.see(metric(v, i, "lr"))]
    (alert,) = shown(AlertMonitor(), *(metric(v, i) for i, v in enumerate([1.0] * 20 + [99.0])))
    assert alert.facts["value"] == 99.0
    assert alert.message == "99 is far above the typical value of 1"


@pytest.mark.parametrize("shape", ["errors of one value", "errors of eight", "rates", "signed"])
def test_losses_of_small_batches_are_no_spikes(shape):
    """Each of eight ranks computes its loss from a few samples, so it is skewed."""
    rng = np.random.default_rng(0)
    draw = {
        "errors of one value": lambda: rng.chisquare(1, 1000),
        "errors of eight": lambda: rng.chisquare(8, 1000) / 8,
        "rates": lambda: np.exp(rng.normal(0, 0.5, 1000)),
        "signed": lambda: rng.exponential(1.0, 1000) - 0.5,
    }[shape]
    for _ in range(8):
        monitor = AlertMonitor([alerts.loss_spike()])
        assert not [v for i, v in enumerate(draw().tolist()) if monitor.see(metric(v, i))]


def test_user_defined_rule():
    def too_wide(record, state):
        state.notes["times"] = state.notes.get("times", 0) + 1
        if record.stats is not None and record.stats.max_abs > 3:
            return f"{record.stats.max_abs:g} after {state.notes['times']}"
        return None

    (alert,) = shown(AlertMonitor([too_wide]), tensor("a", [1.0], 0), tensor("a", [5.0], 1))
    assert (alert.rule, alert.message) == ("too_wide", "5 after 2")


def test_counts_and_logs_a_rule_that_raises(caplog):
    def broken(record, state):
        raise KeyError("oops")

    monitor = AlertMonitor([broken, alerts.nan()])
    assert len(shown(monitor, tensor("a", BAD), tensor("b", FINE))) == 1
    assert caplog.text.count("'broken' raised an error as an alert rule: KeyError") == 1


def test_rejects_invalid_rules_and_actions():
    with pytest.raises(TypeError, match="a rule must be a name, or a function"):
        AlertMonitor([3])
    with pytest.raises(
        ValueError, match="on_alert must be 'stop', 'keep' or a function, got 'halt'"
    ):
        AlertMonitor(on_alert="halt")
    assert AlertMonitor(False).see(tensor("a", BAD)) == []


# -- actions -------------------------------------------------------------------------------


def test_calls_on_alert_and_survives_its_errors(caplog):
    calls = []

    def callback(alert):
        calls.append(alert)
        raise RuntimeError("theirs")

    monitor = AlertMonitor(on_alert=callback)
    assert monitor.see(tensor("a", BAD)) == calls
    assert len(calls) == 1
    assert "on_alert" in caplog.text


def test_check_raises_stop_training_once():
    monitor = AlertMonitor(on_alert="stop")
    monitor.check()
    shown(monitor, tensor("a", BAD, 7), tensor("b", np.full(8, 1.0), 7))
    with pytest.raises(
        tap.StopTraining, match=r"step 7, a \(Activation\): 2 of 4 values"
    ) as caught:
        monitor.check()
    assert caught.value.alert.name == "a"
    monitor.check()


def test_keep_covers_the_step_of_the_alert_and_the_next():
    monitor = AlertMonitor(on_alert=["keep", "stop"])
    assert not monitor.keep(6)
    monitor.see(tensor("a", BAD, 7, rank=1))
    assert [monitor.keep(step, rank=1) for step in (6, 7, 8, 9)] == [False, True, True, False]
    assert not monitor.keep(7, rank=0)


# -- bounds and costs ----------------------------------------------------------------------


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("tensortap.alerts.monitor._MAX_TENSORS", 100)
    monitor = AlertMonitor()
    for i in range(1000):
        monitor.see(tensor(f"l{i}", FINE, i))
        monitor.see(tensor(f"l{i}", BAD, i, Kind.WEIGHT))
    assert len(monitor._tensors) <= 100
    assert len(monitor._step_states[0].bad_weights) <= 100
    assert len(monitor.alerts) <= 1000


def test_a_healthy_record_costs_few_calls():
    """Count calls instead of time: a loaded machine cannot measure microseconds."""
    monitor = AlertMonitor()
    record = tensor("fc", FINE, 1)
    monitor.see(record)
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        monitor.see(record)
    finally:
        sys.setprofile(None)
    assert calls < 12


# -- records -------------------------------------------------------------------------------


def test_alert_survives_conversion_to_a_record():
    (alert,) = shown(AlertMonitor(), tensor("fc", BAD, 3))
    record = record_of(alert, seq=5, time_ns=9, world_size=2)
    assert (record.name, record.kind, record.step, record.seq) == ("fc", Kind.ALERT, 3, 5)
    assert alert_of(record) == alert
    strange = msgspec.structs.replace(record, value="text")
    assert alert_of(strange).message == ""


def test_run_shows_alerts_beside_the_tensor(tmp_path, capsys):
    monitor = AlertMonitor()
    records = [tensor("embed", FINE, 3, seq=0), tensor("fc", BAD, 3, seq=1)]
    (alert,) = shown(monitor, *records)
    later = metric(2.0, 4)
    records += [record_of(alert, seq=2, time_ns=1), msgspec.structs.replace(later, seq=3)]
    run = kept(tmp_path, records)
    assert run.alerts() == [alert]
    run.summary()
    printed = " ".join(capsys.readouterr().out.split())
    assert "Alert" in printed
    assert "2 of 4 values are NaN," in printed
    assert run.get("loss") == 2.0
    assert run.get("fc", kind="Alert")["rule"] == "nan"
    assert [r.kind for r in find_all(run.reader, "fc")] == [Kind.ACTIVATION]
    run.describe("fc", kind="Alert")
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("fc Alert step 3")
    assert "Activation: 2 of 4 values are NaN" in printed
    assert run.logframe()["metadata"]["name"].tolist() == ["embed", "fc"]
