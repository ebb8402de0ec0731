"""Alerts: what each rule sees, where a NaN comes from, and that nothing is said twice."""

from __future__ import annotations

import math
import sys

import msgspec
import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap import alerts
from tensortap.alerts import Watcher, alert_of, record_of
from tensortap.record import Kind, Record
from tensortap.stats import summarize_array
from tests.table.test_logframe import kept

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


def shown(watcher: Watcher, *records: Record) -> list[alerts.Alert]:
    return [alert for record in records for alert in watcher.see(record)]


# -- where it comes from -------------------------------------------------------------------


def test_the_module_that_made_a_nan_from_finite_inputs():
    found = shown(
        Watcher(),
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
    assert "2 NaN of 4, the first of the step; all 2 outputs before it were finite" in alert.message
    assert "its weights have not been seen before" in alert.message


def test_the_first_output_may_have_had_a_bad_batch():
    (alert,) = shown(Watcher(), tensor("embed", BAD))
    assert "no output came before it: look at the batch as well" in alert.message


def test_what_was_seen_of_the_step_before_does_not_count():
    watcher = Watcher()
    assert not shown(watcher, tensor("a", FINE, 0), tensor("b", FINE, 0))
    (alert,) = shown(watcher, tensor("a", BAD, 1), tensor("b", BAD, 1))
    assert alert.name == "a"
    assert "no output came before it" in alert.message


def test_a_gradient_is_made_by_the_module_behind():
    (alert,) = shown(
        Watcher(),
        *(tensor(n, FINE) for n in ("net.0", "net.1", "net.2", "net")),
        tensor("net.2", FINE, kind=Kind.GRADIENT), tensor("net", FINE, kind=Kind.GRADIENT),
        tensor("net.1", BAD, kind=Kind.GRADIENT), tensor("net.0", BAD, kind=Kind.GRADIENT),
    )  # fmt: skip
    assert (alert.name, alert.kind) == ("net.1", Kind.GRADIENT)
    assert alert.origin == "net.2"  # whose backward got a finite one; net is but around it
    (alert,) = shown(Watcher(), tensor("net.2", BAD, kind=Kind.GRADIENT))
    assert "look at the loss" in alert.message


def test_a_weight_gradient_alone_arises_in_its_module():
    (alert,) = shown(
        Watcher(),
        tensor("fc", FINE), tensor("fc", FINE, kind=Kind.GRADIENT),
        tensor("fc.weight", BAD, kind=Kind.WEIGHT_GRADIENT),
    )  # fmt: skip
    assert (alert.module, alert.origin) == ("fc", "fc")
    assert "it arises in fc" in alert.message


def test_a_weight_that_was_bad_from_the_start_is_said_and_what_follows_is_not():
    watcher = Watcher()
    (alert,) = shown(watcher, tensor("fc.weight", BAD, 0, Kind.WEIGHT))
    assert "it was so when it was first seen" in alert.message
    after = [tensor("embed", FINE, 1), tensor("fc", BAD, 1), tensor("head", BAD, 1)]
    assert not shown(watcher, *after)
    assert watcher.followed == 2
    # once it is mended, another NaN is news
    shown(watcher, tensor("fc.weight", FINE, 1, Kind.WEIGHT))
    assert [a.name for a in shown(watcher, tensor("embed", FINE, 2), tensor("fc", BAD, 2))] == [
        "fc"
    ]


def test_a_weight_that_the_update_spoilt():
    watcher = Watcher()
    shown(watcher, tensor("fc.weight", FINE, 0, Kind.WEIGHT))
    (alert,) = shown(watcher, tensor("fc.weight", BAD, 1, Kind.WEIGHT))
    assert "the update made it" in alert.message


def test_an_infinity_before_a_nan_is_named():
    found = shown(Watcher(), tensor("a", FINE), tensor("scores", HUGE), tensor("softmax", BAD))
    assert [(a.rule, a.name, a.origin) for a in found] == [
        ("inf", "scores", "scores"), ("nan", "softmax", "scores"),
    ]  # fmt: skip
    assert "Inf was in scores (Activation) before it" in found[1].message


MASKED = np.array([0.5, -math.inf, 2.0, -math.inf], "float32")


def test_a_mask_is_no_alert_and_no_culprit():
    watcher = Watcher()
    step = [tensor("scores", FINE), tensor("mask", MASKED), tensor("softmax", FINE)]
    assert not shown(watcher, *step, tensor("head", FINE), metric(1.0, 0))
    (alert,) = shown(watcher, *step, tensor("head", BAD), metric(math.nan, 0))
    assert (alert.rule, alert.name, alert.origin) == ("nan", "head", "head")
    assert "outputs before it were finite; 2 more had -Inf, as masks have" in alert.message
    both = np.array([math.nan, -math.inf], "float32")  # a mask on what was NaN before
    assert not shown(watcher, tensor("mask", both))


def test_what_follows_from_a_mask_names_it():
    (alert,) = shown(Watcher(), tensor("a", FINE), tensor("log", MASKED), tensor("wrap", MASKED),
                     tensor("times", BAD), tensor("head", BAD))  # fmt: skip
    assert (alert.rule, alert.name, alert.origin) == ("nan", "times", "log")
    (alert,) = shown(Watcher(), tensor("a", FINE), tensor("log", MASKED), metric(math.inf, 0))
    assert (alert.rule, alert.name, alert.origin) == ("inf", "loss", "log")
    # the rows of a softmax that are masked as a whole
    (alert,) = shown(Watcher(), tensor("mask", MASKED), tensor("softmax", BAD))
    assert (alert.name, alert.origin) == ("softmax", "mask")


def test_minus_infinity_elsewhere_is_no_mask():
    for kind in (Kind.GRADIENT, Kind.WEIGHT, Kind.OPTIMISER_STATE):
        (alert,) = shown(Watcher([alerts.inf()]), tensor("w", MASKED, kind=kind))
        assert alert.rule == "inf"
    both = np.array([math.inf, -math.inf], "float32")
    assert len(shown(Watcher([alerts.inf()]), tensor("a", both))) == 1


def test_ranks_are_watched_each_on_its_own():
    found = shown(Watcher(), tensor("a", BAD, rank=0), tensor("b", BAD, rank=1))
    assert [(a.name, a.rank) for a in found] == [("a", 0), ("b", 1)]


class Root(torch.nn.Module):
    def forward(self, x):
        return x.sqrt()


def watched(model: torch.nn.Module, x: torch.Tensor) -> list[alerts.Alert]:
    """The alerts of one step of a real model, its tensors seen by hooks as they are made."""
    watcher = Watcher([alerts.nan(), alerts.inf()])
    found: list[alerts.Alert] = []

    def see(name, kind, value):
        found.extend(watcher.see(tensor(name, value.detach().numpy(), kind=kind)))

    def hook(name):
        def after(module, inputs, output):
            see(name, Kind.ACTIVATION, output)
            output.register_hook(lambda gradient: see(name, Kind.GRADIENT, gradient))

        return after

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        see(name, Kind.WEIGHT_GRADIENT, parameter.grad)
    return found


def test_the_forward_of_a_real_model():
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(8, 8), Root(), torch.nn.Linear(8, 2))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), body)
    (alert,) = watched(model, torch.randn(16, 4))
    assert (alert.name, alert.origin, alert.kind) == ("2.1", "2.1", Kind.ACTIVATION)
    assert "all 3 outputs before it were finite" in alert.message


def test_the_backward_of_a_real_model():
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.ReLU(), Root(), torch.nn.Linear(8, 2))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), body)
    found = watched(model, torch.randn(16, 4))
    # the root of zero is zero, its slope is not finite
    assert [(a.rule, a.name, a.origin, a.kind) for a in found] == [
        ("inf", "1.0", "1.1", Kind.GRADIENT)
    ]


# -- once ----------------------------------------------------------------------------------


def test_an_alert_comes_once_and_again_after_it_has_passed():
    watcher = Watcher([alerts.nan()])
    steps = [BAD, BAD, BAD, FINE, FINE, BAD, BAD]
    found = [len(watcher.see(tensor("a", v, i * 10))) for i, v in enumerate(steps)]
    assert found == [1, 0, 0, 0, 0, 1, 0]
    assert watcher.alerts[-1].again == 2
    assert watcher.counts["nan"] == 2
    assert watcher.again["nan"] == 3


def test_one_call_of_many_that_is_bad_is_not_news_every_step():
    watcher = Watcher([alerts.nan()])
    found = [
        len(watcher.see(tensor("shared", BAD if call == 1 else FINE, step, call=call)))
        for step in range(4)
        for call in range(3)
    ]
    assert sum(found) == 1


def test_what_was_computed_again_and_alerts_themselves_are_not_looked_at():
    watcher = Watcher()
    assert watcher.see(tensor("a", BAD, tags={"recompute": "1"})) == []
    assert watcher.see(tensor("a", BAD, kind=Kind.ALERT)) == []


def test_states_of_one_parameter_are_told_apart():
    watcher = Watcher([alerts.saturated()])
    top = np.array([3e38], "float32")
    states = [tensor("w", top, kind=Kind.OPTIMISER_STATE, tags={"state": s}) for s in ("mu", "nu")]
    assert len(shown(watcher, *states)) == 2


# -- the rules -----------------------------------------------------------------------------


def run_of(rule, sizes, kind=Kind.GRADIENT) -> list[int]:
    watcher = Watcher([rule])
    return [
        step
        for step, size in enumerate(sizes)
        if watcher.see(tensor("fc", FINE * np.float32(size), step, kind))
    ]


def test_exploding():
    noise = 2.0 ** np.random.default_rng(0).normal(0, 1, 40)
    assert run_of(alerts.exploding(), noise) == []
    assert run_of(alerts.exploding(), [*noise[:20], 1000.0, *noise[20:]]) == [20]
    assert run_of(alerts.exploding(factor=10), [*noise[:20], 30.0]) == [20]
    assert run_of(alerts.exploding(), [1.0, 1e6]) == []  # nobody knows yet what is typical
    assert run_of(alerts.exploding(warmup=1), [1.0, 1e6]) == [1]
    assert run_of(alerts.exploding(warmup=1), [1.0, 1e6], Kind.ACTIVATION) == []
    assert run_of(alerts.exploding(), [1.0] * 20 + [1000.0] * 200 + [1e6]) == [20, 220]


def test_vanishing():
    noise = list(2.0 ** np.random.default_rng(0).normal(0, 1, 40))
    assert run_of(alerts.vanishing(), noise) == []
    assert run_of(alerts.vanishing(), [*noise, 1e-5, 1e-5, 1e-5, 1e-5]) == [42]
    assert run_of(alerts.vanishing(), [0.0] * 5) == [2]
    assert run_of(alerts.vanishing(patience=1), [1e-20]) == [0]
    assert run_of(alerts.vanishing(), [0.0, 1.0] * 5) == []
    assert not Watcher().see(tensor("fc", [math.nan], kind=Kind.GRADIENT))[1:]


def test_dead():
    zeros = np.zeros(100)
    zeros[:3] = 1
    watcher = Watcher([alerts.dead()])
    found = [watcher.see(tensor("relu", zeros, step)) for step in range(4)]
    assert [len(f) for f in found] == [0, 0, 1, 0]
    assert found[2][0].message == "97.0% of the output is zero, 3 times in a row"
    assert not shown(Watcher([alerts.dead(share=0.98, patience=1)]), tensor("relu", zeros))
    assert not shown(Watcher([alerts.dead(patience=1)]), tensor("loss", [0.0]))
    assert not shown(Watcher([alerts.dead(patience=1)]), tensor("w", zeros, kind=Kind.WEIGHT))


def test_saturated():
    values = np.array([448.0, 300.0, 1.0, 2.0] + [0.5] * 16)
    (alert,) = shown(Watcher([alerts.saturated()]), tensor("q", values, dtype="float8_e4m3fn"))
    assert alert.facts == {"share": 0.1}
    assert "10.0% of the values are at the end of float8_e4m3fn: 2^8 and above" in alert.message
    assert not shown(Watcher([alerts.saturated()]), tensor("q", values, dtype="float32"))
    assert not shown(Watcher([alerts.saturated()]), tensor("q", [2**31 - 1], dtype="int32"))
    assert not shown(
        Watcher([alerts.saturated(share=0.2)]), tensor("q", values, dtype="float8_e4m3fn")
    )


def test_constant():
    (alert,) = shown(Watcher(), tensor("gate", np.full(8, -0.5)))
    assert (alert.rule, alert.message) == ("constant", "all 8 finite values are -0.5")
    assert not shown(Watcher(), tensor("gate", np.zeros(8)))
    assert not shown(Watcher(), tensor("mean", [0.5]))
    # a norm begins with ones, and the gradient of a mean is the same everywhere
    ones = np.ones(8)
    assert not shown(Watcher(), tensor("ln.weight", ones, kind=Kind.WEIGHT))
    assert not shown(Watcher(), tensor("out", ones, kind=Kind.GRADIENT))
    watcher = Watcher([alerts.constant(kinds=[Kind.WEIGHT])])
    assert shown(watcher, tensor("ln.weight", ones, kind=Kind.WEIGHT))


def test_loss_spike():
    rng = np.random.default_rng(0)
    losses = [5.0 * 0.99**i + 0.1 * float(rng.standard_normal()) for i in range(200)]

    def steps(values, **options):
        watcher = Watcher([alerts.loss_spike(**options)])
        return [i for i, v in enumerate(values) if watcher.see(metric(v, i))]

    assert steps(losses) == []
    assert steps([*losses[:100], 12.0, *losses[100:]]) == [100]
    assert steps([*losses[:100], 12.0], rise=10.0) == []
    watcher = Watcher([alerts.loss_spike()])
    assert not [v for i, v in enumerate([1.0] * 20 + [99.0]) if watcher.see(metric(v, i, "lr"))]
    (alert,) = shown(Watcher(), *(metric(v, i) for i, v in enumerate([1.0] * 20 + [99.0])))
    assert alert.facts["value"] == 99.0
    assert alert.message == "99, where 1 is typical"


def test_a_loss_that_is_no_number():
    (alert,) = shown(Watcher(), metric(1.0, 0), metric(math.nan, 1))
    assert (alert.rule, alert.name, alert.module) == ("nan", "loss", "")


def test_a_rule_of_ones_own():
    def too_wide(record, memory):
        memory.notes["times"] = memory.notes.get("times", 0) + 1
        if record.stats is not None and record.stats.max_abs > 3:
            return f"{record.stats.max_abs:g} after {memory.notes['times']}"
        return None

    (alert,) = shown(Watcher([too_wide]), tensor("a", [1.0], 0), tensor("a", [5.0], 1))
    assert (alert.rule, alert.message) == ("too_wide", "5 after 2")


def test_a_rule_that_fails_harms_nobody(caplog):
    def broken(record, memory):
        raise KeyError("oops")

    watcher = Watcher([broken, alerts.nan()])
    assert len(shown(watcher, tensor("a", BAD), tensor("b", FINE))) == 1
    assert watcher.faults == 2
    assert caplog.text.count("the rule 'broken' failed") == 1
    faults = []
    Watcher([broken], on_fault=lambda *what: faults.append(what)).see(tensor("a", FINE))
    assert faults[0][0] == "broken"


def test_what_is_no_rule_is_said_at_once():
    with pytest.raises(TypeError, match="a rule is a function"):
        Watcher(["nan"])
    with pytest.raises(ValueError, match="on_alert is 'stop', 'keep' or a function, not 'halt'"):
        Watcher(on_alert="halt")
    assert Watcher(False).see(tensor("a", BAD)) == []


# -- what an alert does --------------------------------------------------------------------


def test_a_function_is_called_and_may_fail(caplog):
    calls = []

    def callback(alert):
        calls.append(alert)
        raise RuntimeError("theirs")

    watcher = Watcher(on_alert=callback)
    assert watcher.see(tensor("a", BAD)) == calls
    assert len(calls) == 1
    assert "on_alert" in caplog.text


def test_stop_is_raised_where_it_is_asked_for_and_once():
    watcher = Watcher(on_alert="stop")
    watcher.check()
    shown(watcher, tensor("a", BAD, 7), tensor("b", np.full(8, 1.0), 7))
    with pytest.raises(tap.StopTraining, match=r"step 7, a \(Activation\): 2 NaN of 4") as caught:
        watcher.check()
    assert caught.value.alert.name == "a"
    watcher.check()


def test_keep_says_which_tensors_are_wanted_whole():
    watcher = Watcher(on_alert=["keep", "stop"])
    assert not watcher.keep(6)
    watcher.see(tensor("a", BAD, 7, rank=1))
    assert [watcher.keep(step, rank=1) for step in (6, 7, 8, 9)] == [False, True, True, False]
    assert not watcher.keep(7, rank=0)


# -- bounds and costs ----------------------------------------------------------------------


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("tensortap.alerts.monitor._SERIES", 100)
    watcher = Watcher()
    for i in range(1000):
        watcher.see(tensor(f"l{i}", FINE, i))
        watcher.see(tensor(f"l{i}", BAD, i, Kind.WEIGHT))
    assert len(watcher._series) <= 100
    assert len(watcher._moments[0].bad_weights) <= 100
    assert len(watcher.alerts) <= 1000


def test_a_healthy_record_costs_no_more_than_a_few_dozen_calls():
    """Counted, not timed: a machine under load says nothing about a microsecond."""
    watcher = Watcher()
    record = tensor("fc", FINE, 1)
    watcher.see(record)
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        watcher.see(record)
    finally:
        sys.setprofile(None)
    assert calls < 12


# -- records -------------------------------------------------------------------------------


def test_an_alert_is_a_record_and_comes_back():
    (alert,) = shown(Watcher(), tensor("fc", BAD, 3))
    record = record_of(alert, seq=5, time_ns=9, world_size=2)
    assert (record.name, record.kind, record.step, record.seq) == ("fc", Kind.ALERT, 3, 5)
    assert alert_of(record) == alert
    strange = msgspec.structs.replace(record, value="text")
    assert alert_of(strange).message == ""


def test_alerts_of_a_run_are_seen_and_do_not_hide_the_tensor(tmp_path, capsys):
    watcher = Watcher()
    records = [tensor("embed", FINE, 3, seq=0), tensor("fc", BAD, 3, seq=1)]
    (alert,) = shown(watcher, *records)
    later = metric(2.0, 4)
    records += [record_of(alert, seq=2, time_ns=1), msgspec.structs.replace(later, seq=3)]
    run = kept(tmp_path, records)
    assert run.alerts() == [alert]
    run.summary()
    printed = " ".join(capsys.readouterr().out.split())
    assert "Alert" in printed
    assert "2 NaN of 4, the first of the step;" in printed
    assert run.get("loss") == 2.0
    assert run.get("fc", kind="Alert")["rule"] == "nan"
    assert [r.kind for r in tap.readers.reader.find_all(run.reader, "fc")] == [Kind.ACTIVATION]
    run.describe("fc", kind="Alert")
    assert "step 3, fc (Activation): 2 NaN" in " ".join(capsys.readouterr().out.split())
    assert run.logframe()["metadata"]["name"].tolist() == ["embed", "fc"]
