"""The black box beside programs that do unusual things: it neither lies nor disturbs."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.errors import TensortapError
from tensortap.rooms.blackbox.explaining import DATA, DETERMINISTIC, FINITE
from tensortap.rooms.blackbox.torch import HeldTensor
from tensortap.rooms.track.observing import tensors_in


class Hostile:
    """A model of two layers; each step of a test trains it in its own way."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def loss(self, x):
        return (self.model(x) - x.sum(1, keepdim=True)).square().mean()

    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def bits(self):
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        for state in self.optimizer.state.values():
            tensors += [x for x in state.values() if isinstance(x, torch.Tensor)]
        return [x.numpy().tobytes() for x in tensors]


def trained(make, batches):
    """Train plain and with a box that explains each step; check that both end alike."""
    ends = []
    for boxed in (False, True):
        program = Hostile()
        step = make(program)
        if boxed:
            step = tap.blackbox(step, program.model, program.optimizer, every=4)
        verdicts = []
        torch.manual_seed(1)
        for batch in batches():
            step(*batch)
            if boxed:
                verdicts.append(step.explain())
        ends.append(program.bits())
    assert ends[0] == ends[1]
    assert all(verdict.kind == FINITE and verdict.same for verdict in verdicts), verdicts


def rows(count=6):
    return [(torch.randn(3, 4),) for _ in range(count)]


def changes_the_batch(program):
    def step(x):
        x.mul_(2).add_(1)
        return program.update(program.loss(x))

    return step


def accumulates(program):
    def step(x):
        for part in x.chunk(3):
            (program.loss(part) / 3).backward()
        program.optimizer.step()
        program.optimizer.zero_grad(set_to_none=False)
        return program.loss(x).detach()

    return step


def searches_lines(program):
    program.optimizer = torch.optim.LBFGS(program.model.parameters(), max_iter=3)

    def step(x):
        def closure():
            program.optimizer.zero_grad()
            loss = program.loss(x)
            loss.backward()
            return loss

        return program.optimizer.step(closure).detach()

    return step


def compiles(program):
    loss = torch.compile(program.loss, backend="eager")
    return lambda x: program.update(loss(x))


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("make", [changes_the_batch, accumulates, searches_lines, compiles])
def test_unusual_steps_are_replayed_and_left_alone(make):
    trained(make, rows)


@pytest.mark.usefixtures("no_errors")
def test_a_batch_that_requires_gradients():
    def make(program):
        def step(x):
            loss = program.loss(x)
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
            return program.update(loss + gradient.square().sum().detach())

        return step

    trained(make, lambda: [(torch.randn(3, 4, requires_grad=True),) for _ in range(5)])


@pytest.mark.usefixtures("no_errors")
def test_models_and_unusual_containers_as_arguments():
    batch = defaultdict(list, x=torch.randn(3, 4))
    program = Hostile()

    def step(model, optimizer, batch):
        assert (model, optimizer) == (program.model, program.optimizer)  # never copies of them
        assert batch["missing"] == []
        optimizer.zero_grad()
        loss = (model(batch["x"]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    box = tap.blackbox(step, program.model, program.optimizer, every=3)
    for _ in range(5):
        box(program.model, program.optimizer, batch)
    assert box.explain().same
    assert box.nbytes < 16 << 10  # without a model in each batch


@pytest.mark.usefixtures("no_errors")
def test_several_optimizers():
    for listed in (True, False):
        program = Hostile()
        first, last = program.model[0], program.model[2]
        both = [torch.optim.AdamW(first.parameters()), torch.optim.SGD(last.parameters(), 0.1, 0.9)]

        def step(x, program=program, both=both):
            for optimizer in both:
                optimizer.zero_grad()
            loss = program.loss(x)
            loss.backward()
            for optimizer in both:
                optimizer.step()
            return loss.detach()

        given = [both] if listed else both
        box = tap.blackbox(step, program.model, *given, every=4)
        for (x,) in rows():
            box(x)
            before = [p.clone() for p in program.model.parameters()], repr(both[1].state_dict())
            assert box.explain().same
            after = [p.clone() for p in program.model.parameters()], repr(both[1].state_dict())
            assert all(map(torch.equal, before[0], after[0]))
            assert before[1] == after[1]


def test_iterators_are_never_read_twice(errors):
    """A step that draws its own batch is not run again: the program would miss batches."""
    loader = torch.utils.data.DataLoader(torch.arange(48.0).reshape(12, 4), batch_size=2)
    seen = []
    batches = iter(loader)

    def draw():
        return next(batches)

    program = Hostile()

    def step():
        x = draw()
        seen.append(x[0, 0].item())
        loss = program.update(program.loss(x))
        return loss * float("nan") if len(seen) == 3 else loss

    box = tap.blackbox(step, program.model, program.optimizer)
    for _ in range(6):
        box()
    assert seen == [0.0, 8.0, 16.0, 24.0, 32.0, 40.0]
    assert box.verdicts == []
    assert errors() == 1
    box = tap.blackbox(step, program.model, program.optimizer)
    batches = iter(loader)
    box()
    with pytest.raises(TensortapError, match="reads the iterator batches, which cannot be rewound"):
        box.explain()
    other = tap.blackbox(lambda x: program.loss(next(x)), program.model)
    before = errors()
    assert torch.isfinite(other(iter([torch.ones(1, 4)])))
    assert errors() == before + 1
    assert other.explain() is None


def test_steps_that_raise_are_explained_on_request():
    program = Hostile()

    def step(x):
        loss = program.loss(torch.log(x))
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()}")
        return program.update(loss)

    box = tap.blackbox(step, program.model, program.optimizer)
    for _ in range(3):
        box(torch.rand(3, 4) + 1)
    bad = torch.rand(3, 4) + 1
    bad[1, 2] = -1
    before = program.bits()
    with pytest.raises(FloatingPointError):
        box(bad)
    verdict = box.explain()
    assert program.bits() == before
    assert (verdict.kind, verdict.rows, verdict.step, verdict.same) == (DATA, (1,), 3, True)
    assert verdict.finding.operation == "log"
    assert "Then it raises FloatingPointError: the loss is nan" in verdict.text
    box(torch.rand(3, 4) + 1)  # training goes on
    assert box.explain().kind == FINITE
    with pytest.raises(RuntimeError):
        box(torch.rand(3, 7))
    verdict = box.explain()
    assert verdict.kind == DATA
    assert "It raises RuntimeError: mat1 and mat2 shapes" in verdict.text


def test_a_model_that_was_changed_is_said():
    program = Hostile()
    box = tap.blackbox(lambda x: program.update(program.loss(x)), program.model, program.optimizer)
    box(torch.randn(3, 4))
    program.model[2] = nn.Linear(5, 2)
    before = program.bits()
    with pytest.raises(TensortapError, match=r"has changed since .* parameter 2.weight"):
        box.explain()
    assert program.bits() == before
    box(torch.randn(3, 4))  # with another snapshot
    assert box.explain().kind == FINITE
    program.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(TensortapError, match="the optimizer 0 4 was not there, and is there now"):
        box.explain()
    box(torch.randn(3, 4))
    assert box.explain().kind == FINITE


def test_other_models_count_and_come_back():
    """An average of the weights is part of the state, and of the memory that the box states."""
    program = Hostile()
    average = torch.optim.swa_utils.AveragedModel(program.model)

    def step(x):
        loss = program.update(program.loss(x))
        average.update_parameters(program.model)
        return loss

    box = tap.blackbox(step, program.model, program.optimizer, average, every=2)
    for (x,) in rows(3):
        box(x)
    before = [x.clone() for x in average.state_dict().values()]
    assert box.explain().same
    assert all(map(torch.equal, before, average.state_dict().values()))
    own = sum(x.nbytes for x in average.state_dict().values())
    assert box._snapshot.nbytes > 3 * own


def test_snapshots_use_the_same_memory_again():
    program = Hostile()
    box = tap.blackbox(
        lambda x: program.update(program.loss(x)), program.model, program.optimizer, every=2
    )
    seen = []
    for (x,) in rows(9):
        box(x)
        held = tensors_in(box._snapshot.content[0], HeldTensor)
        seen.append({each.copy.data_ptr() for _, each in held})
    assert seen[2] == seen[4] == seen[6] == seen[8]  # from the first one with gradients on
    assert box.explain().same


def test_faults_inside_of_compiled_code_are_found():
    program = Hostile()

    def bad(x):
        return program.loss(x / (x - x))

    compiled = torch.compile(bad, backend="eager")
    box = tap.blackbox(
        lambda x: program.update(compiled(x)), program.model, program.optimizer, every=3
    )
    box(torch.ones(3, 4))
    assert box.verdict.kind == DETERMINISTIC
    assert box.verdict.finding.operation == "div"
