"""Steps are compared with an earlier run while they are tracked."""

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.runs import tables
from tensortap.sources.reference import ReferenceRun


def train(steps=4, change=None, *, seed=0, **options):
    """Train a small model; `change(model, step)` is called before each step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt, **options) as tracker:
        for step in range(steps):
            if change is not None:
                change(model, step)
            loss = model(torch.arange(12.0).reshape(2, 6)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            tracker.step(loss=loss.item())
    return tracker


def scaled(model, step):
    if step == 2:
        model[2].weight.data *= 1.01


def nudged(model, step):
    if step == 2:
        weight = model[2].weight.data
        weight[1, 3] = torch.nextafter(weight[1, 3], torch.tensor(9.0))


@pytest.fixture(scope="module", params=["statistics", "values", "digests"])
def good(request, tmp_path_factory):
    """A run with one of the things that a step may be compared by."""
    options = {"statistics": {}, "values": {"tensors": True}, "digests": {"digests": True}}
    by = options[request.param]
    return by, train(out_path=tmp_path_factory.mktemp("good"), **by).path


def test_finds_the_first_difference_and_its_culprit(good, no_errors):
    by, path = good
    assert train(reference=path, **by).alerts == []
    (alert,) = train(change=scaled, reference=path, **by).alerts
    assert (alert.rule, alert.name, alert.step) == ("reference", "2", 2)
    assert "culprit: 2: everything before it agrees, its output does not" in alert.message
    assert str(path.name) in alert.message


def test_stops_in_the_step_of_the_difference(good):
    by, path = good
    with pytest.raises(tap.StopTraining, match=r"step 2, 2 \(Activation\): differs from"):
        train(change=scaled, reference=path, stop=True, **by)


@pytest.mark.parametrize("good", ["digests"], indirect=True)
def test_digests_find_one_bit(good):
    _, path = good
    # the digests of the reference are reason enough to compute them
    (alert,) = train(change=nudged, reference=path, atol=0, rtol=0).alerts
    assert alert.step == 2
    assert "the bits differ, by digest" in alert.message


def test_works_beside_a_run_and_alerts(good, tmp_path):
    by, path = good
    seen = []
    tracker = train(
        change=scaled, reference=path, alerts=True, on_alert=seen.append,
        out_path=tmp_path / "new", **by,
    )  # fmt: skip
    assert [alert.rule for alert in seen] == ["reference"]
    assert tap.open(tracker.path).alerts() == seen


def test_only_the_steps_that_are_compared_are_read(tmp_path, monkeypatch, no_errors):
    monkeypatch.setattr(tables, "ROW_GROUP", 64)
    path = train(30, out_path=tmp_path).path
    read = []
    look_at = ReferenceRun.look_at

    def look(run, low, high):
        look_at(run, low, high)
        read.append((low, len(run.table())))

    monkeypatch.setattr(ReferenceRun, "look_at", look)
    late = lambda model, step: scaled(model, 2) if step == 25 else None
    with pytest.raises(tap.StopTraining, match=r"step 25, 1 \(Gradient\)"):
        train(30, change=late, reference=path, stop=True)
    assert [step for step, _ in read] == [-1, *range(1, 26)]  # the first has initial weights, too
    assert len(tap.open(path).table()) > 600
    assert max(rows for _, rows in read) <= 3 * 64


def test_a_run_with_other_steps_says_so(good, caplog):
    by, path = good
    assert train(reference=path, init_step=100, **by).alerts == []
    assert "has none of these records" in caplog.text


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="stop, atol and rtol need reference="):
        tap.track(nn.Linear(1, 1), stop=True)
    with pytest.raises(tap.TensortapError, match="nothing"):
        tap.track(nn.Linear(1, 1), reference=tmp_path / "nothing")


def test_jax(tmp_path, no_errors):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def run(factor, **options):
        params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
        with tap.track(model_state=params, **options) as tracker:
            for step in range(4):
                grads = jax.grad(lambda p: ((jnp.ones(3) @ p["w"] + p["b"]) ** 2).sum())(params)
                rate = factor if step == 2 else 0.01
                params = jax.tree.map(lambda p, g, rate=rate: p - rate * g, params, grads)
                tracker.step(params, grads)
        return tracker

    path = run(0.01, out_path=tmp_path, digests=True).path
    assert run(0.01, reference=path).alerts == []
    (alert,) = run(0.02, reference=path).alerts
    assert (alert.step, alert.kind.value) == (2, "Weight")


_RANKS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def train(factor, kind, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    for p in model.parameters():
        p.data = torch.randint(-2, 3, p.shape).double()
    net = model
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.25)
    x = torch.arange(16.0).reshape(4, 4).double() - 8
    with tap.track(model, optimizer=opt, activations=False, gradients=False, **options) as tracker:
        for step in range(3):
            part = x if kind == "one" else x[2 * rank : 2 * rank + 2]
            scale = 1 if kind == "one" else 2
            (model(part).sum() * scale).backward()
            if step == 1 and rank == 1:
                for p in model.parameters():
                    p.grad.mul_(factor)
            opt.step()
            opt.zero_grad()
            tracker.step()
    return [[str(a.kind.value), a.step] for a in tracker.alerts], tracker.path

path = [None]
if rank == 0:
    path = [str(train(1, "one", digests=True, out_path=os.environ["RUNS"])[1])]
dist.broadcast_object_list(path)
result = [train(1, "fsdp", reference=path[0])[0], train(2, "fsdp", reference=path[0])[0],
          tap.receipt().reasons["error"]]
"""


@pytest.mark.slow
def test_other_layouts_than_that_of_the_reference(gloo, tmp_path):
    found = gloo(_RANKS, RUNS=str(tmp_path))
    assert found == [[[], [["Weight", 1]], 0], [[], [], 0]]
