"""`tap.ops`: operations as records, with lines, compared and stored like all others."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from tensortap.core.record import Kind


def line_of(function, text):
    """Return the number of the line of a function that contains a text."""
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, x, mask):
        scores = self.query(x) @ x.transpose(-1, -2)
        scores = scores.masked_fill(mask, float("-inf"))
        return scores.softmax(-1) @ x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x, mask):
        return self.head(self.relu(self.attention(x, mask)))


def training(masked=False, foreach=None):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    mask = torch.zeros(2, 3, 3, dtype=torch.bool)
    mask[:, 0, 1:] = True
    mask[1, 2] = masked

    def step():
        loss = model(torch.randn(2, 3, 4), mask).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def state(model):
    return [p.detach().clone() for p in model.parameters()]


def test_every_operation_of_a_step_has_a_record():
    model, step = training()
    with tap.ops(model) as ops:
        step()
    records = {record.name: record for record in ops.records}
    assert all(record.kind is Kind.OP for record in records.values())
    softmax = next(r for r in ops.records if r.tags["op"] == "softmax")
    assert softmax.name == f"attention:{softmax.tags['index']}:softmax"
    assert softmax.tags["module"] == "attention"
    assert softmax.tags["line"] == f"{__file__}:{line_of(Attention.forward, 'softmax')}"
    assert softmax.tags["function"] == "Attention.forward"
    assert softmax.type == "aten._softmax.default"
    assert softmax.stats.count == 18
    filled = next(r for r in ops.records if r.tags["op"] == "masked_fill")
    assert softmax.tags["inputs"] == filled.digest.hex()
    phases = [record.tags["phase"] for record in ops.records]
    assert [phase for phase in ("forward", "backward", "optimizer") if phase in phases] == [
        "forward", "backward", "optimizer"]  # fmt: skip
    updates = [r for r in ops.records if r.tags["op"] == "addcdiv_"]
    assert {r.tags["parameter"] for r in updates} == {n for n, _ in model.named_parameters()}


def test_a_backward_operation_has_the_line_of_its_forward():
    model, step = training()
    with tap.ops(model) as ops:
        step()
    backward = [r for r in ops.records if r.tags["phase"] == "backward"]
    softmax = next(r for r in backward if r.tags["op"] == "softmax_backward_data")
    assert softmax.tags["line"] == f"{__file__}:{line_of(Attention.forward, 'softmax')}"
    assert (softmax.tags["module"], softmax.tags["node"]) == ("attention", "SoftmaxBackward0")
    relu = next(r for r in backward if r.tags["op"] == "threshold_backward")
    assert relu.tags["module"] == "relu"  # in place: torch makes another node after it
    assert all(r.tags.get("line") for r in backward if r.tags["node"] != "AccumulateGrad")
    query = [r for r in backward if r.tags["module"] == "attention.query" and r.tags["op"] == "mm"]
    assert query


@pytest.mark.parametrize(("masked", "foreach"), [(False, True), (True, False)])
def test_training_is_bit_identical(masked, foreach):
    plain, step = training(masked, foreach)
    losses = [step() for _ in range(3)]
    random = torch.get_rng_state()
    model, step = training(masked, foreach)
    with tap.ops(model):
        observed = [step() for _ in range(3)]
    for one, other in zip(losses + state(plain), observed + state(model), strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    assert torch.equal(random, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def test_first_nonfinite_names_operation_line_inputs_and_reason():
    model, step = training(masked=True)
    with tap.ops(model) as ops:
        step()
    found = ops.first_nonfinite
    assert (found.operation, found.module, found.phase) == ("softmax", "attention", "forward")
    assert found.why == "-inf minus -inf in softmax: row [1, 2] is fully masked"
    assert found.line.line == line_of(Attention.forward, "softmax")
    assert found.code == "return scores.softmax(-1) @ x"
    assert [each.name for each in found.inputs] == ["self"]
    assert found.inputs[0].stats.neginfs == 7
    text = str(found)
    assert "return scores.softmax(-1) @ x" in text
    assert "output: 3 NaN of 18" in text
    later = [r for r in ops.records if r.stats is not None and r.stats.nans]
    assert all(r.tags["made"] == found.name for r in later)


def test_explanation_has_the_lines_and_the_chain(tmp_path):
    path = tap.init(tmp_path)
    model, step = training(masked=True)
    with tap.ops(model) as ops:
        step()
        step()  # one verdict, however long it goes on
    assert {record.kind for record in ops.records} == {Kind.OP}
    tap.finish()
    (alert,) = tap.open(path).alerts()
    assert (alert.rule, alert.kind, alert.explanation) == (
        "why", Kind.OP, ops.first_nonfinite.explanation)  # fmt: skip
    assert alert.message.endswith("row [1, 2] is fully masked")
    found = alert.explanation
    assert found.code == "return scores.softmax(-1) @ x"
    assert found.line == found.first_line + 3
    assert found.source[2].strip() == 'scores = scores.masked_fill(mask, float("-inf"))'
    chain = [link.operation for link in found.chain]
    assert chain == ["randn", "addmm", "bmm", "masked_fill"]  # without views
    assert found.chain[1].code == "scores = self.query(x) @ x.transpose(-1, -2)"
    assert "-Inf 7!" in found.chain[-1].output


def test_credentials_near_the_line_are_hidden(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "wall-paper-42")

    def program():
        api_key = "sk-proj-abcdefghijklmnopqrstuvwx1234567890"
        x = torch.zeros(2).log(), "wall-paper-42"
        return api_key, x

    with tap.ops() as ops:
        program()
    source = "\n".join(ops.first_nonfinite.explanation.source)
    assert 'api_key = "***"' in source
    assert 'x = torch.zeros(2).log(), "***"' in source
    assert "***" in ops.first_nonfinite.code


def test_digests_and_statistics_follow_writes_to_shared_memory():
    x = torch.zeros(3, 4)
    row = x[1]
    with tap.ops() as ops:
        row + 1
        x.t()
        x.add_(2)
        row + 1
        x.t()
        torch.full((4,), 2.0)
    found = ops.records
    first, second = (r for r in found if r.tags["op"] == "add")
    made = next(r for r in found if r.tags["op"] == "full")
    assert first.tags["inputs"] != second.tags["inputs"] == made.digest.hex()
    assert [(r.stats.min, r.stats.count) for r in found if r.tags["op"] == "t"] == [
        (0.0, 12), (2.0, 12)]  # fmt: skip


def test_masks_and_finite_programs_have_no_finding():
    model, step = training()
    with tap.ops(model) as ops:
        step()
        torch.where(torch.tensor([True, False]), torch.ones(2), torch.full((2,), torch.inf)).clamp(
            max=1
        )
    assert ops.first_nonfinite is None


def test_operations_of_a_custom_backward_have_its_lines():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, gradient):
            return gradient * 2 / 0

    with tap.ops() as ops:
        Double.apply(torch.ones(2, requires_grad=True)).sum().backward()
    found = ops.first_nonfinite
    assert (found.operation, found.phase) == ("div", "backward")
    assert found.line.line == line_of(Double, "/ 0")


def test_what_a_checkpoint_computes_again_is_told_apart():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
    with tap.ops(model) as ops:
        checkpoint(
            model, torch.ones(1, 2, requires_grad=True), use_reentrant=False
        ).sum().backward()
    phases = {r.tags["phase"] for r in ops.records if r.tags["op"] == "addmm"}
    assert phases == {"forward", "recompute"}


def test_compiled_code_runs_eagerly_and_says_so(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)

    def step(run):
        optimizer.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch._dynamo.utils.counters.clear()
    step(compiled)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level(logging.WARNING), tap.ops(compiled) as ops:
        observed = step(compiled)
    assert "compiled code runs eagerly" in ops.remarks["torch.compile"]
    assert "compiled code runs eagerly" in caplog.text
    found = {(r.tags["module"], r.tags["op"], r.tags["phase"]) for r in ops.records}
    assert {("0", "addmm", "forward"), ("1", "gelu", "forward"), ("1", "gelu_backward", "backward"),
            ("0", "mm", "backward")} <= found  # fmt: skip
    model.load_state_dict(start)
    assert torch.equal(step(model), observed)  # the same bits as without the compiler
    step(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # not compiled anew
    bad = torch.compile(lambda y: torch.log(y - y), backend="aot_eager")
    with tap.ops() as ops:  # compiled for the first time inside
        bad(x)
    assert ops.first_nonfinite.why == "log of 0: 12 elements are 0"
    assert ops.first_nonfinite.line.line == line_of(
        test_compiled_code_runs_eagerly_and_says_so, "torch.log(y - y)"
    )


def run_of(folder, scale):
    """Train into a run; from the second step on, an operation is different."""
    path = tap.init(folder)
    model, step = training()
    done = []

    def hook(module, args, output):
        return output * (scale if done else 1)

    handle = model.attention.register_forward_hook(hook)
    with tap.ops(model):
        for _ in range(2):
            step()
            tap.step()
            done.append(1)
    handle.remove()
    tap.finish()
    return path


def test_compare_names_the_first_operation_that_differs(tmp_path):
    one, other = (run_of(tmp_path / name, scale) for name, scale in (("a", 1), ("b", 2)))
    report = tap.compare(one, other)
    assert not report
    number = line_of(run_of, "output * (scale")
    assert report.first.key.step == 1
    assert report.culprit.startswith("culprit: attention:")
    assert f":mul at {__file__}:{number}: its inputs agree, its output does not" in report.culprit
    assert bool(tap.compare(one, run_of(tmp_path / "c", 1)))


def test_nothing_stays_behind_after_an_error():
    model, step = training()
    ops = tap.ops(model)

    def fail():
        with ops:
            step()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    before = len(ops.records)
    step()
    assert len(ops.records) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("foreach", [False, True])
def test_an_infinite_learning_rate_is_found(foreach):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"), foreach=foreach)
    with tap.ops(model) as ops:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    found = ops.first_nonfinite
    assert found.phase == "optimizer"
    assert found.why == "its alpha is -inf"


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_loss_that_the_forward_made_infinite_is_not_blamed_on_the_backward(scale):
    model = nn.Linear(2, 1)
    with tap.ops(model) as ops:
        loss = -torch.log(model(torch.ones(1, 2)) * 0).mean() * scale
        loss.backward()
    found = ops.first_nonfinite
    assert (found.operation, found.phase) == ("log", "forward")
    assert found.why == "log of 0: 1 element is 0"
