"""`tap.blackbox`: planted faults, their class, operation and line, and training left untouched."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.record import Kind
from tensortap.rooms.blackbox.explaining import DATA, DETERMINISTIC, TRANSIENT

INF, NAN = float("inf"), float("nan")
STEPS, FAULTY = 9, 6  # the fault is there from this step on


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.unused = nn.Parameter(torch.ones(3))
        self.fault = fault
        self.calls = 0  # a step may keep numbers in its modules

    def forward(self, x):
        self.calls += 1
        h = self.drop(self.norm(self.one(x)))
        if self.fault is not None and self.calls > FAULTY:
            h = self.fault(h)
        return self.two(h) + 0 * self.unused.sum()


class Program:
    """A training program with a fault; `once` is consumed by faults that do not come back."""

    def __init__(
        self, forward=None, batch=None, update=None, once=None, optimizer="adam", **options
    ):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  the state that programs share
        self.model = Net(forward)
        make = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
        self.optimizer = make(self.model.parameters(), lr=1e-2, **options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.batch, self.update = batch, update
        self.once = once
        self.step = self.train

    def train(self, x, y):
        self.optimizer.zero_grad()
        noise = random.random() + np.random.rand()  # noqa: NPY002
        loss = (self.model(x) * (1 + 1e-3 * noise) - y).square().mean()
        loss.backward()
        if self.once is not None and self.model.calls > FAULTY:
            fault, self.once = self.once, None
            fault(self)
        if self.update is not None and self.model.calls > FAULTY:
            self.update(self)
        self.optimizer.step()
        return loss.detach()

    def run(self):
        losses = []
        for number in range(STEPS):
            x, y = torch.randn(6, 4), torch.randn(6, 1)
            if self.batch is not None and number == FAULTY:
                self.batch(x)
            losses.append(self.step(x, y))
            self.schedule.step()
        return losses

    def content(self):
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        for state in self.optimizer.state.values():
            tensors += [x for x in state.values() if isinstance(x, torch.Tensor)]
        rate = repr(self.optimizer.param_groups[0]["lr"])  # NaN, too
        numbers = self.model.calls, rate, self.schedule.last_epoch
        drawn = random.random(), np.random.rand()  # noqa: NPY002
        return [x.numpy().tobytes() for x in tensors], numbers, drawn


FORWARD = {
    "log": lambda h: torch.log(-h.abs() - 1),
    "to_copy": lambda h: h + (h * 0 + 70000).half().float(),
    "softmax": lambda h: h.masked_fill(h == h, -INF).softmax(-1),
    "log_": lambda h: (h - h).sub_(1).log_(),
}
BACKWARD = {
    "sqrt": ("div", lambda h: h + torch.sqrt(h - h)),
    "where": ("div", lambda h: torch.where(h > 1e9, torch.log(h - h), h)),
}
UPDATES = {
    "eps": ("addcdiv_", {"optimizer": "adam", "eps": 0.0}, None),
    "clip": ("div_", {"optimizer": "sgd"},
             lambda p: p.model.unused.grad.div_(p.model.unused.grad.norm())),
}  # fmt: skip
BATCHES = {
    "nan": (lambda x: x[2].fill_(NAN), (2,)),
    "two": (lambda x: x.index_fill_(0, torch.tensor([0, 4]), NAN), (0, 4)),
}


def flip(tensor):
    """Flip the highest bit of the exponent of all elements: of small ones it makes huge ones."""
    tensor.view(torch.int32).bitwise_xor_(1 << 30)


ONCE = {
    "flipped weight": lambda p: flip(p.model.two.weight.data.mul_(4)),
    "optimizer state": lambda p: [s["exp_avg"].fill_(NAN) for s in p.optimizer.state.values()],
}  # fmt: skip


def boxed(**fault):
    """Run a program plain and with a black box; check that both end with the same bits."""
    plain = Program(**fault)
    expected = [x.numpy().tobytes() for x in plain.run()]
    end = plain.content()
    program = Program(**fault)
    program.step = tap.blackbox(
        program.train, program.model, program.optimizer, program.schedule, every=4
    )
    assert [x.numpy().tobytes() for x in program.run()] == expected
    assert program.content() == end
    return program.step


def check(box, operation, number):
    verdict = box.verdicts[0]
    assert verdict.kind == DETERMINISTIC, verdict
    assert verdict.same
    assert (verdict.finding.operation, verdict.finding.line.line) == (operation, number), verdict
    assert verdict.step == FAULTY


@pytest.mark.parametrize("name", FORWARD)
def test_faults_in_the_forward(name):
    fault = FORWARD[name]
    check(boxed(forward=fault), name, fault.__code__.co_firstlineno)


@pytest.mark.parametrize("name", BACKWARD)
def test_faults_in_the_backward(name):
    operation, fault = BACKWARD[name]
    check(boxed(forward=fault), operation, fault.__code__.co_firstlineno)


@pytest.mark.parametrize("name", UPDATES)
def test_faults_in_the_update(name):
    operation, options, update = UPDATES[name]
    box = boxed(update=update, **options)
    verdict = box.verdicts[0]
    assert verdict.kind == DETERMINISTIC, verdict
    assert verdict.finding.operation == operation, verdict
    assert verdict.finding.line.file == __file__


@pytest.mark.parametrize("name", BATCHES)
def test_faults_in_the_data(name):
    fault, rows = BATCHES[name]
    verdict = boxed(batch=fault).verdicts[0]
    assert (verdict.kind, verdict.rows, verdict.step) == (DATA, rows, FAULTY), verdict
    assert "row" in verdict.text


@pytest.mark.parametrize("name", ONCE)
def test_faults_that_do_not_come_back(name):
    verdict = boxed(once=ONCE[name]).verdicts[0]
    assert verdict.kind == TRANSIENT, verdict
    assert "does not happen again" in verdict.text


def test_programs_without_faults_have_no_verdict_until_asked():
    box = boxed()
    assert box.verdicts == []
    assert box.explain().kind == "finite"
    assert 0 < box.nbytes < 64 << 10


def test_verdict_and_operations_are_in_the_run(tmp_path, caplog):
    path = tap.init(tmp_path)
    program = Program(forward=FORWARD["log"])
    box = tap.blackbox(program.train, program.model, program.optimizer, every=4)
    program.step = box
    program.run()
    tap.finish()
    run = tap.open(path)
    alert = next(each for each in run.alerts() if each.rule == "why")
    assert alert.message == box.verdict.text
    assert alert.explanation == box.verdict.finding.explanation
    assert alert.explanation.code in box.verdict.text
    assert box.verdict.text in caplog.text
    assert any(record.kind is Kind.OP and record.tags.get("why") for record in run.records())


class Logarithm(nn.Module):
    def forward(self, h):
        return torch.log(h - h - 1)


class Hidden(nn.Module):
    """Replaces the NaN of one of its modules, which no result shows."""

    def __init__(self):
        super().__init__()
        self.log = Logarithm()

    def forward(self, h):
        return h + torch.nan_to_num(self.log(h), 0.0)


ALERTED = {
    "backward": (BACKWARD["sqrt"][1], "div", BACKWARD["sqrt"][1].__code__.co_firstlineno),
    "hidden": (Hidden(), "log", Logarithm.forward.__code__.co_firstlineno + 1),
}


@pytest.mark.parametrize("name", ALERTED)
def test_alerts_are_explained(name):
    """An alert is explained before the next step, though every result so far is finite."""
    fault, operation, line = ALERTED[name]
    plain = Program(forward=fault)
    expected, end = repr(plain.run()), plain.content()
    program = Program(forward=fault)
    box = tap.blackbox(program.train, program.model, program.optimizer, program.schedule, every=4)
    verdicts = []

    def step(x, y):
        loss = box(x, y)
        verdicts.append(len(box.verdicts))
        tracker.step()
        return loss

    program.step = step
    with tap.track(program.model, program.optimizer, alerts=True) as tracker:
        assert repr(program.run()) == expected
    assert program.content() == end
    assert verdicts[FAULTY : FAULTY + 2] == [0, 1]
    check(box, operation, line)


class ScaledProgram:
    """A program with a GradScaler, and a generator that is used within steps and between them."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
        self.generator = torch.Generator().manual_seed(1)
        self.step = self.train

    def train(self, x):
        self.optimizer.zero_grad()
        noise = torch.randn(x.shape, generator=self.generator)
        loss = self.model(x + noise).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def run(self, each=lambda: None):
        seen = []
        for _ in range(STEPS):
            loss = self.step(torch.randn(3, 4, generator=self.generator))
            each()
            seen += [loss.item(), self.scaler.get_scale(), *self.model.weight.flatten().tolist()]
        return seen, self.generator.get_state().tolist(), self.scaler.state_dict()


def test_scalers_and_generators_are_part_of_the_state():
    expected = ScaledProgram().run()
    scales = expected[0][1::6]
    assert max(scales) > min(scales)
    program = ScaledProgram()
    box = program.step = tap.blackbox(
        program.train, program.model, program.optimizer, program.scaler, program.generator, every=4
    )
    verdicts = []
    assert program.run(lambda: verdicts.append(box.explain())) == expected
    assert {verdict.kind for verdict in verdicts} == {"finite"}


def test_memory_is_bounded():
    model = nn.Linear(256, 1)
    batch, nbytes = torch.ones(64, 256), 64 << 10
    box = tap.blackbox(lambda x: model(x).mean(), model, every=50, memory=3 * nbytes)
    for _ in range(9):
        box(batch)
        state = model.weight.nbytes + model.bias.nbytes
        assert box.nbytes <= 3 * nbytes + state
    assert box.nbytes > nbytes
    assert box.explain().kind == "finite"
    box(torch.ones(512, 256))  # more than the bound by itself: it is not kept
    assert box.explain() is None
    box(batch)
    assert box.explain().kind == "finite"


def test_steps_that_raise_or_are_not_seen_begin_another_snapshot():
    program = Program()
    box = tap.blackbox(program.train, program.model, program.optimizer, every=4)
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    box(x, y)
    with pytest.raises(RuntimeError):
        box(x, torch.randn(5, 3))
    box(x, y)
    assert box.explain().same
    tap.enable(False)
    box(x, y)
    tap.enable()
    box(x, y)
    assert box.explain().same


def test_arguments_are_checked():
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="train_step"):
        tap.blackbox(None, model)
    with pytest.raises(ValueError, match="every must be at least 1"):
        tap.blackbox(print, model, every=0)
    with pytest.raises(TypeError, match="model must be"):
        tap.blackbox(print, "model")


def test_steps_run_again_only_if_asked():
    model, calls = torch.nn.Linear(2, 1), []

    def train_step(x):
        calls.append(None)  # a side effect
        return model(x).mean()

    step = tap.blackbox(train_step, model, explain=False)
    step(torch.full((4, 2), torch.nan))
    assert (len(calls), step.verdict) == (1, None)
    assert step.explain().kind in ("data", "deterministic")
    assert len(calls) > 1


def test_steps_are_not_those_of_a_tracker_that_has_ended():
    model = nn.Linear(2, 1)
    with tap.track(model) as tracker:
        for _ in range(7):
            model(torch.ones(1, 2))
            tracker.step()

    def train(x):
        return model(x).sum()

    step = tap.blackbox(train, model)
    for number in range(4):
        step(torch.full((1, 2), NAN if number == 3 else 1.0))
    assert step.verdict.step == 3
    with tap.track(model) as tracker:  # a tracker that counts gives the number
        step = tap.blackbox(train, model)
        for number in range(4):
            step(torch.full((1, 2), NAN if number == 2 else 1.0))
            tracker.step()
    assert step.verdict.step == 2
