"""Tracking changes nothing: same bits, same exceptions, no references and no hooks left behind."""

import gc
import traceback
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind


class Net(nn.Module):
    """A model with dropout, an in-place module, a norm and a checkpoint."""

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


def train(tracked, autocast=False, steps=6, **options):
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    tracker = tap.track(model, optimizer=opt, **options) if tracked else None
    if tracker:
        tracker.__enter__()
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(6, 5, 8)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.detach().clone())
        if tracker:
            tracker.step(loss=loss)
    if tracker:
        tracker.__exit__(None, None, None)
        assert len(list(tracker.records)) > 300
    state = [t.clone() for t in (*model.state_dict().values(), torch.get_rng_state())]
    moments = [t.clone() for s in opt.state.values() for t in s.values()]
    return losses + state + moments


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread", "no_errors")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"tensors": True, "alerts": True}, {"stash": lambda t: {"n": t.float().norm().item()}}],
)
def test_training_is_bit_identical(autocast, options):
    train(False, autocast)  # warm up: the first training of a process may round differently
    plain, tracked = train(False, autocast), train(True, autocast, **options)
    assert len(plain) == len(tracked)
    for one, other in zip(plain, tracked, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# -- ending --------------------------------------------------------------------------------


def hooks_of(model, opt):
    modules = sum(len(m._forward_hooks) for m in model.modules())
    parameters = sum(
        len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ())
        for p in model.parameters()
    )
    return modules + parameters + len(opt._optimizer_step_pre_hooks) + ("zero_grad" in vars(opt))


class Boom(Exception):
    pass


@pytest.mark.parametrize("error", [None, Boom, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("given", [True, False])
def test_removes_every_hook(error, given):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    raised = error("mine") if error else None

    def program():
        with tap.track(model, optimizer=opt if given else None) as tracker:
            trackers.append(tracker)
            assert hooks_of(model, opt) > 3
            model(torch.randn(2, 4)).sum().backward()
            if raised:
                raise raised
            tracker.step()

    trackers = []
    if raised is None:
        program()
    else:
        with pytest.raises(error) as caught:
            program()
        assert caught.value is raised
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
        # the traceback has no frame of tensortap
        frames = traceback.extract_tb(caught.tb)
        assert {frame.filename for frame in frames} == {__file__}
    (tracker,) = trackers
    assert hooks_of(model, opt) == 0
    count = len(list(tracker.records))
    model(torch.randn(2, 4)).sum().backward()
    tracker.step()  # ignored after the end
    assert len(list(tracker.records)) == count


def test_errors_while_ending_do_not_replace_the_users(monkeypatch, caplog):
    model = nn.Sequential(nn.Linear(4, 4))
    tracker = tap.track(model)
    monkeypatch.setattr(tracker._observer, "settle", lambda: 1 / 0)
    with pytest.raises(Boom), tracker:
        raise Boom
    assert not model[0]._forward_hooks
    assert "error while ending a tracker" in caplog.text


def test_restores_a_replaced_zero_grad():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    mine = opt.zero_grad = lambda: calls.append("mine")
    with tap.track(model, optimizer=opt):
        opt.zero_grad()
    assert vars(opt)["zero_grad"] is mine
    assert calls == ["mine"]


# -- errors while observing ----------------------------------------------------------------


class Odd(nn.Module):
    def forward(self, x):
        return x.to_sparse()


def test_counts_outputs_without_statistics(errors, caplog):
    model = nn.Sequential(nn.Linear(4, 4), Odd())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt) as tracker:
        for _ in range(3):
            torch.sparse.sum(model(torch.randn(2, 4))).backward()
            opt.step()
            tracker.step()
    assert errors() >= 3
    assert "not dense" in caplog.text
    kinds = {r.kind for r in tracker.records}
    assert {Kind.ACTIVATION, Kind.WEIGHT, Kind.WEIGHT_GRADIENT} <= kinds


def test_stash_of_the_form_of_other_tools(caplog, errors, tmp_path):
    def stash(tensor):
        bins = torch.histc(tensor.detach(), 8, 0, 1)
        return {"scalar_stats": {"std": 2.0}, "exp_hist": (bins, torch.arange(8.0)), "l1": 1}

    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    with tap.track(model, stash=stash, include="^1", to=tmp_path) as tracker:
        out = model(torch.randn(5, 4))
        tracker.step()
    scalars = tracker.logframe()["scalar_stats"]
    assert set(scalars["std"]) == {2.0}
    assert set(scalars["l1"]) == {1.0}
    kept = tap.open(tracker.path).get("1", kind="Activation")
    counts, edges = kept["exp_hist"]
    assert counts.tolist() == stash(out)["exp_hist"][0].tolist()
    assert edges.tolist() == list(range(8))
    assert not errors()
    assert "stash" not in caplog.text


def test_message_of_a_stash_that_raises(caplog, errors, monkeypatch):
    monkeypatch.setattr(pipeline, "_errors", set())
    model = nn.Sequential(nn.Linear(4, 4))
    with tap.track(model, stash=lambda t: {"l1": 1 / 0}) as tracker:
        model(torch.randn(5, 4))
        tracker.step()
    (message,) = [r.getMessage() for r in caplog.records if "stash" in r.getMessage()]
    assert "whose record has no extra statistics: ZeroDivisionError" in message
    records = list(tracker.records)
    assert errors() == len(records) > 4
    assert all(r.stats is not None for r in records)


def test_counts_metrics_that_are_no_numbers(errors):
    model = nn.Sequential(nn.Linear(4, 4))
    with tap.track(model) as tracker:
        tracker.step(loss="high", lr=0.1, tensor=torch.tensor(2.5, requires_grad=True))
    assert errors() == 1
    assert tracker.metrics().to_dict("list") == {
        "step": [0], "rank": [0], "lr": [0.1], "tensor": [2.5],
    }  # fmt: skip
    weights = [r.name for r in tracker.records if r.kind is Kind.WEIGHT and r.step == 0]
    assert weights == ["0.weight", "0.bias"]


def test_counts_errors_of_rules_and_callbacks(errors):
    model = nn.Sequential(nn.Linear(4, 4))
    with tap.track(model, alerts=[lambda record, memory: 1 / 0]) as tracker:
        model(torch.randn(2, 4)).sum().backward()
        tracker.step()
    assert errors() == len(list(tracker.records)) > 5
    with tap.track(
        model, alerts=[lambda record, memory: "so"], on_alert=lambda alert: 1 / 0
    ) as tracker:
        tracker.step()
    assert len(tracker.alerts) == 2


def test_strict_mode_raises_errors(monkeypatch):
    monkeypatch.setattr(pipeline, "strict", True)
    model = nn.Sequential(Odd())
    with pytest.raises(tap.TensortapError), tap.track(model):
        model(torch.randn(2, 4))


def test_records_nothing_while_disabled():
    model = nn.Sequential(nn.Linear(4, 4))
    tap.enable(False)
    try:
        with tap.track(model) as tracker:
            model(torch.randn(2, 4)).sum().backward()
            tracker.step(loss=1.0)
    finally:
        tap.enable()
    assert list(tracker.records) == []


# -- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False])
def test_keeps_no_tensor_alive(given):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()  # a reference cycle would keep gigabytes until the next collection
    try:
        with tap.track(model, optimizer=opt if given else None) as tracker:
            x = torch.randn(3, 5, 4)
            y = model(x)
            loss = y.sum()
            kept = [weakref.ref(t) for t in (x, y, loss)]
            mark = Boom()
            y.grad_fn.metadata["mark"] = mark
            node = weakref.ref(mark)  # nodes of the graph cannot be referenced weakly
            del mark
            loss.backward()
            opt.step()
            gradient = weakref.ref(model[0].weight.grad)
            opt.zero_grad()
            tracker.step()
            del x, y, loss
            assert [ref() for ref in kept] == [None] * 3
            assert node() is None
            assert gradient() is None
    finally:
        gc.enable()
    known = weakref.ref(model[0].weight)
    del model, opt
    gc.collect()
    assert known() is None
    assert list(tracker.records)


@pytest.mark.slow
def test_memory_does_not_grow_with_a_run_open(open_run):
    import psutil

    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
    opt = torch.optim.Adam(model.parameters())
    process = psutil.Process()
    with tap.track(model, optimizer=opt, alerts=True) as tracker:

        def steps(count):
            for _ in range(count):
                opt.zero_grad()
                model(torch.randn(4, 16)).sum().backward()
                opt.step()
                tracker.step(loss=1.0)
            tap.flush()
            gc.collect()
            return process.memory_info().rss

        steps(60)
        objects = len(gc.get_objects())
        before = steps(20)
        after = steps(200)
        assert len(gc.get_objects()) < objects + 2000
        assert after < before + (30 << 20)
        assert tracker._observer.sent.memory.records == []
