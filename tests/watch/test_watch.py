"""Targets, names and rates of watchers, and that training is not affected."""

import gc
import os
import signal
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from tensortap.rooms.watch import watch_observer
from tests.processes import wait_for
from tests.watch.notes import Notes

pytestmark = pytest.mark.slow  # each watcher starts a process


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path / "notes")


@pytest.fixture
def watch(notes):
    """Start watchers that capture everything; `seen` flushes one and returns its notes."""
    started = []

    def watch(targets=None, **options):
        options = {"rate": None, "start_method": "fork", **options}
        started.append(tap.watch(targets, options.pop("recorder", notes), **options))
        return started[-1]

    yield watch
    for watcher in started:
        watcher.close(10)


def seen(watcher, notes):
    assert watcher.flush(60)
    return notes


def small(inplace=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 2))


# -- targets ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_errors")
def test_model_includes_all_its_modules(watch, notes):
    model = small()
    watcher = watch(model)
    x = torch.randn(5, 3)
    y = model(x)
    found = seen(watcher, notes)
    assert found.names == ["0", "1", "2", "Sequential"]
    (record,) = found.of("2")
    assert record["kind"] == "Activation"
    assert record["type"] == "torch.nn.Linear"
    assert (record["dtype"], record["shape"]) == ("float32", [5, 2])
    assert record["value"] == y.tolist()  # bit for bit
    assert record["tags"]["device"] == "cpu"  # works without a GPU


def test_lists_modules_and_patterns(watch, notes):
    model = small()
    watcher = watch([model[0], model[2]])
    watcher.attach(model[0])
    watcher.attach({"m": model}, include=r"^m\.", exclude=r"1$")
    model(torch.randn(1, 3))
    assert seen(watcher, notes).names == ["Linear", "Linear0", "Linear1", "m.0", "m.2"]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.usefixtures("no_errors")
def test_outputs_gradients_or_both(watch, notes, inplace):
    model = small(inplace)
    grads = {}
    watcher = watch({"m": model}, kind="both")
    h = model[0](torch.randn(5, 3))
    before = h.tolist()
    if not inplace:
        h.register_hook(lambda g: grads.update({"m.0": g.tolist()}))
    y = model[2](model[1](h))
    y.register_hook(lambda g: grads.update({"m.2": g.tolist()}))
    y.square().sum().backward()
    found = seen(watcher, notes)
    assert found.of("m.0", "Activation")[0]["value"] == before
    assert sorted(r["name"] for r in found.records if r["kind"] == "Gradient") == [
        "m.0", "m.1", "m.2",
    ]  # fmt: skip
    for name, value in grads.items():
        assert found.of(name, "Gradient")[0]["value"] == value
    # a value and its gradient have the same step
    assert {r["step"] for r in found.records} == {0}


@pytest.mark.usefixtures("no_errors")
def test_parameters(watch, notes):
    model = small()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    watcher = watch({"w": model[0].weight, "frozen": frozen}, kind="both")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    values, grads = [], []
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        values.append(model[0].weight.tolist())
        grads.append(model[0].weight.grad.tolist())
        opt.step()
    found = seen(watcher, notes)
    assert [r["value"] for r in found.of("w", "Weight")] == values
    assert [r["value"] for r in found.of("w", "Weight_Gradient")] == grads
    assert [r["step"] for r in found.of("w", "Weight")] == [0, 1, 2]
    assert [r["value"] for r in found.of("frozen")] == [[1.0, 1.0]]


@pytest.mark.usefixtures("no_errors")
def test_tensors_give_their_gradients(watch, notes):
    leaf = torch.ones(2, requires_grad=True)
    inner = leaf * 3
    watcher = watch({"leaf": leaf, "inner": inner})
    (inner * 2).sum().backward()
    found = seen(watcher, notes)
    assert [(r["name"], r["kind"], r["value"]) for r in found.records] == [
        ("inner", "Gradient", [2.0, 2.0]), ("leaf", "Gradient", [6.0, 6.0]),
    ]  # fmt: skip
    watcher.detach("leaf")
    watcher.attach({"both": leaf}, kind="both")
    (leaf * 5).sum().backward()
    assert [(r["kind"], r["value"]) for r in seen(watcher, notes).of("both")] == [
        ("Value", [1.0, 1.0]), ("Gradient", [5.0, 5.0]),
    ]  # fmt: skip
    watcher.close()
    assert not leaf._backward_hooks


def test_rejects_invalid_targets_and_leaves_no_hooks(watch):
    model = small()
    with pytest.raises(TypeError, match=r"watcher\.catch\(tensor, name\)"):
        watch({"m": model, "x": torch.ones(2)})
    with pytest.raises(TypeError, match=r"got ndarray; .*watcher\.catch"):
        watch(np.ones(2))
    with pytest.raises(TypeError, match="names of targets must be non-empty strings"):
        watch({1: model})
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(tap.core.errors.NotFound):
        tap.watcher()


@pytest.mark.usefixtures("no_errors")
def test_catch_takes_values_of_any_framework(watch, notes):
    import jax.numpy as jnp

    watcher = watch()
    watcher.catch(np.arange(3), "numpy")
    watcher.catch(jnp.arange(3.0), "jax")
    watcher.catch(torch.arange(3, dtype=torch.bfloat16), "torch")
    watcher.catch(0.5, "number")
    found = seen(watcher, notes)
    assert {r["name"]: (r["value"], r["dtype"]) for r in found.records} == {
        "numpy": ([0, 1, 2], "int64"), "jax": ([0, 1, 2], "float32"),
        "torch": ([0, 1, 2], "bfloat16"), "number": (0.5, ""),
    }  # fmt: skip
    assert {r["kind"] for r in found.records} == {"Value"}


# -- steps, messages, switches ---------------------------------------------------------------


def test_steps_and_calls(watch, notes):
    model = nn.Linear(2, 2)
    watcher = watch({"fc": model})
    for _ in range(2):
        model(torch.ones(1, 2))
    tap.step(10)
    for _ in range(2):
        model(torch.ones(1, 2))
    tap.step()
    model(torch.ones(1, 2))
    found = [(r["step"], r["call"]) for r in seen(watcher, notes).of("fc")]
    assert found == [(0, 0), (1, 0), (10, 0), (10, 1), (11, 0)]


def test_message_mode_and_switches(watch, notes):
    model = nn.Linear(2, 2)
    watcher = watch({"fc": model})
    watcher.message = "epoch 3"
    model(torch.ones(1, 2))
    watcher.enabled = False
    model(torch.ones(1, 2))
    watcher.catch(1.0, "x")
    watcher.enabled = True
    tap.enable(False)
    model(torch.ones(1, 2))
    tap.enable()
    watcher.message = None  # the same as ""
    model.eval()
    model(torch.ones(1, 2))
    tags = [r["tags"] for r in seen(watcher, notes).records]
    assert tags == [
        {"device": "cpu", "message": "epoch 3"}, {"device": "cpu", "mode": "eval"},
    ]  # fmt: skip
    assert watcher.enabled


# -- rate and transform ----------------------------------------------------------------------


def test_rate_limits_each_name_before_anything_is_copied(watch, notes, monkeypatch):
    copied = []
    snapshot = watch_observer.arrays.snapshot
    monkeypatch.setattr(
        watch_observer.arrays, "snapshot", lambda *args: copied.append(args) or snapshot(*args)
    )
    model = small()
    watcher = watch({"m": model}, rate=0.001, kind="both", transform=lambda t: t)
    for _ in range(20):
        model(torch.randn(2, 3)).sum().backward()
        watcher.catch(1.0, "x")
    found = seen(watcher, notes)
    assert (
        len(found.records) == len(copied) == 9
    )  # 4 modules with 2 kinds each, and the caught value
    assert len({(r["name"], r["kind"]) for r in found.records}) == 9


def test_rate_limit_is_accurate(monkeypatch):
    rate = watch_observer.RateLimit(20.0)
    now = [0]
    monkeypatch.setattr(watch_observer, "time", SimpleNamespace(monotonic_ns=lambda: now[0]))
    taken = 0
    for i in range(7000):  # steps of 3 ms, of which the pause of 50 ms is not a multiple
        now[0] = i * 3_000_000
        taken += rate.due("x")
    assert taken == pytest.approx(21 * 20, abs=3)
    now[0] += 10**12  # a long pause is not followed by a burst
    burst = 0
    for _ in range(100):
        now[0] += 1_000_000
        burst += rate.due("x")
    assert burst <= 4
    assert all(watch_observer.RateLimit(None).due("x") for _ in range(3))


def test_transform_runs_in_this_process_without_a_graph(watch, notes):
    model = nn.Linear(3, 2)
    graphs = []

    def mean(tensor):
        graphs.append((torch.is_grad_enabled(), tensor.requires_grad))
        return tensor.float().mean(0)

    def mean_or_none(tensor):
        return mean(tensor) if len(tensor) > 1 else None

    watcher = watch({"fc": model}, transform=mean_or_none)
    y = model(torch.randn(6, 3))
    model(torch.randn(1, 3))
    (record,) = seen(watcher, notes).records
    assert record["value"] == y.detach().mean(0).tolist()
    assert record["shape"] == [2]
    assert graphs == [(False, False)]


def test_transform_that_raises_is_reported_once(watch, notes, caplog, errors):
    model = small()
    watcher = watch({"m": model}, transform=lambda t: 1 / 0)
    for _ in range(3):
        model(torch.randn(2, 3)).sum().backward()
    assert errors() == 12
    assert len([r for r in caplog.records if "transform raised" in r.getMessage()]) == 1
    assert seen(watcher, notes).records == []


def test_reports_a_transform_that_changes_the_tensor(watch, caplog, errors):
    model = nn.Linear(3, 2)
    watch({"fc": model}, transform=lambda t: t.zero_())
    with torch.no_grad():
        model(torch.randn(1, 3))
    assert errors() == 1
    assert "changes the training" in caplog.text


# -- several ---------------------------------------------------------------------------------


def test_several_watchers(watch, tmp_path, notes):
    model = small()
    first = watch({"a": model[0]})
    assert tap.watcher() is first
    other_notes = Notes(tmp_path / "other")
    second = watch({"b": model[2]}, recorder=other_notes, name="second")
    assert tap.watcher() is first  # the one without a name
    with pytest.raises(
        tap.core.errors.NotFound, match="no watcher 'third'; running are 'watch', 'sec"
    ):
        tap.watcher("third")
    assert tap.watcher("second") is second
    tap.watcher("second").attach({"c": model[1]})
    model(torch.randn(1, 3))
    assert seen(first, notes).names == ["a"]
    assert seen(second, other_notes).names == ["b", "c"]
    with pytest.raises(ValueError, match="'c' is already being watched"):
        second.attach({"c": model[1]})
    second.detach("c")
    with pytest.raises(tap.core.errors.NotFound, match="'c' is not being watched; watched are 'b'"):
        second.detach("c")
    assert not model[1]._forward_hooks
    with pytest.raises(ValueError, match="'second' is already running"):
        watch(model, name="second")
    second.close()
    assert tap.watcher() is first
    with pytest.raises(RuntimeError, match="is closed"):
        second.attach(model)


@pytest.mark.usefixtures("no_errors")
def test_second_call_without_a_name_joins_the_first_worker(watch, notes):
    model = small()
    first = watch({"model": model})
    layer = {"c0": model[0]}
    assert tap.watch(layer, notes, kind="gradients") is first
    assert tap.watch({"c2": model[2]}, rate=None) is first  # the recorder may be left out
    model(torch.randn(5, 3)).sum().backward()
    found = seen(first, notes)
    assert {r["pid"] for r in found.records} == {first.pid}
    assert {(r["name"], r["kind"]) for r in found.records if r["name"][0] == "c"} == {
        ("c0", "Gradient"), ("c2", "Activation"),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"with another recorder, every: .*name="):
        tap.watch({"other": model}, print, every=3)
    with pytest.raises(ValueError, match="'c0' is already being watched"):
        tap.watch(layer)
    tap.watcher().close()
    assert len(notes.closed) == 1
    with pytest.raises(tap.core.errors.NotFound, match="no watcher is running"):
        tap.watcher()


def test_call_after_the_worker_died_starts_another(watch, notes, caplog):
    first = watch({"model": small()})
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: first.died)
    again = watch({"model": small()})
    assert again is tap.watcher() is not first
    assert again.alive


# -- ranks and devices -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "rank", "watches"),
    [(0, "1", False), ("all", "1", True), ([1, 3], "1", True)],
)
def test_selected_ranks_watch(watch, notes, monkeypatch, ranks, rank, watches):
    monkeypatch.setattr("tensortap.core.ranks._launched", (int(rank), 4))
    model = nn.Linear(2, 2)
    watcher = watch({"fc": model}, rank=ranks)
    model(torch.ones(1, 2))
    assert (watcher.pid is not None) == watches  # otherwise there is not even a process
    assert [r["rank"] for r in seen(watcher, notes).records] == [int(rank)] * watches


# -- no side effects --------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(5)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        x = self.norm(self.drop(self.act(self.inp(x))))
        x = checkpoint(self.block, x, use_reentrant=False)
        return self.out(x)


def train(autocast, watch=None, **options):
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    watcher = None
    if watch:
        watcher = watch({"net": model, "w": model.inp.weight}, kind="both", **options)
    losses = []
    for _ in range(6):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(6, 5, 8)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.detach().clone())
    if watcher:
        watcher.close()
    state = [t.clone() for t in (*model.state_dict().values(), torch.get_rng_state())]
    return losses + state + [t.clone() for s in opt.state.values() for t in s.values()]


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize(
    ("autocast", "options"),
    [(False, {}), (True, {"transform": lambda t: t.float().abs()})],
)
def test_training_is_bit_identical(watch, notes, autocast, options):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(autocast)  # warm up: the first one of a process may differ
        plain, watched = train(autocast), train(autocast, watch, **options)
    finally:
        torch.set_num_threads(threads)
    assert len(plain) == len(watched)
    for one, other in zip(plain, watched, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    # once per step: recomputation in a checkpoint gives no second record
    assert [r["step"] for r in notes.of("net.block.1", "Activation")] == list(range(6))
    assert [r["step"] for r in notes.of("net.block.1", "Gradient")] == list(range(6))
    assert len(notes.records) == 6 * (2 * 10 + 2)


def hooks_of(model):
    modules = sum(len(m._forward_hooks) for m in model.modules())
    parameters = sum(
        len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ())
        for p in model.parameters()
    )
    return modules + parameters


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_hooks_are_removed_whatever_is_raised(watch, notes, error):
    model = small()
    raised = error("mine") if error else None

    def program():
        with watch({"m": model, "w": model[0].weight}):
            assert hooks_of(model) == 5
            model(torch.randn(2, 3)).sum().backward()
            if raised:
                raise raised

    if raised is None:
        program()
    else:
        with pytest.raises(error) as caught:
            program()
        assert caught.value is raised
        assert caught.value.__context__ is None
    assert hooks_of(model) == 0
    assert len(notes.closed) == 1
    assert len(notes.records) == 5  # everything sent was processed


def test_keeps_no_references(watch):
    model = small()
    leaf = torch.ones(2, requires_grad=True)
    watcher = watch({"m": model, "w": model[0].weight, "leaf": leaf}, kind="both")
    x = torch.randn(2, 3)
    y = model(x)
    (y.sum() * leaf.sum()).backward()
    kept = [weakref.ref(t) for t in (x, y)]
    del x, y
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    known = [weakref.ref(t) for t in (model, model[0].weight, leaf)]
    watcher.close()
    del model, leaf
    gc.collect()
    assert [ref() for ref in known] == [None] * 3
    assert "closed" in repr(watcher)


def test_training_continues_when_out_of_memory(watch, notes, monkeypatch, errors):
    from tensortap.core.buffers import OutOfMemory

    def no_room(*_):
        raise OutOfMemory("none left")

    model = nn.Linear(2, 2)
    watcher = watch({"fc": model})
    monkeypatch.setattr(watch_observer.arrays, "snapshot", no_room)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert errors() == 1
    assert seen(watcher, notes).records == []


def test_forked_child_watches_nothing(watch, notes):
    model = nn.Linear(2, 2)
    watcher = watch({"fc": model})
    model(torch.ones(1, 2))
    pid = os.fork()
    if not pid:
        model(torch.ones(1, 2))
        try:
            tap.watcher()
        except tap.core.errors.NotFound:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    model(torch.ones(1, 2))
    assert len(seen(watcher, notes).records) == 2


def test_failed_start_is_not_repeated(watch, monkeypatch, errors, caplog):
    model = nn.Linear(2, 2)
    watcher = watch({"fc": model}, enabled=False)
    model(torch.ones(1, 2))
    assert (watcher.pid, watcher.alive) == (None, False)
    tries = []

    def no_process(*args, **kwargs):
        tries.append(args)
        raise OSError("no processes left")

    monkeypatch.setattr("tensortap.rooms.watch.watcher.WorkerSink", no_process)
    watcher.enabled = True
    for _ in range(3):
        model(torch.ones(1, 2))  # training continues
    assert (len(tries), errors(), watcher.receipt.dropped) == (1, 0, 3)
    assert "no processes left" in caplog.text


def test_disabled_capturing_starts_no_worker(watch):
    tap.enable(False)
    try:
        watcher = watch(nn.Linear(2, 2))
        assert watcher.pid is None
        with pytest.raises(tap.TensortapError, match="start_method='fork'"):
            # errors are raised nevertheless
            tap.watch(on_record=lambda record: None, start_method="spawn", name="other")
    finally:
        tap.enable()
