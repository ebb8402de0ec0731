"""Wrappers around a model: checkpoints, DataParallel, compiled graphs."""

import logging
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from tensortap.alerts import nan
from tensortap.record import Kind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_errors"),
    # a warning of the compiler itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

ACT, GRAD, WEIGHT, WGRAD = (
    Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT, Kind.WEIGHT_GRADIENT,
)  # fmt: skip


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


# -- activation checkpointing --------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant, on=True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(mlp() for _ in range(3))
        self.reentrant, self.on = reentrant, on

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.on else block(x)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_outputs_are_tagged(reentrant, found):
    frames, gradients = [], []
    for on in (False, True):
        model = Checkpointed(reentrant, on)
        with tap.track(model) as tracker:
            for n in range(2):
                for m in range(2):  # each call is recomputed under its own index
                    x = torch.full((2, 4), n + m + 1.0, requires_grad=True)
                    model(x).square().sum().backward()
                model.zero_grad()
                tracker.step()
        seen = found(tracker)
        gradients.append({(r.name, r.step, r.call): r.stats for r in seen.of(GRAD)})
        assert len(gradients[-1]) == len(seen.of(GRAD)) == 13 * 4
        frame = tracker.logframe()
        frames.append(frame[frame["metadata"]["tensor_type"].eq("Activation")])
    assert gradients[0] == gradients[1]
    again = [r for r in seen.of(ACT) if r.tags.get("recompute")]
    assert again
    first = {(r.name, r.step, r.call): r.stats for r in seen.of(ACT) if not r.tags}
    assert len(first) == 13 * 4
    for record in again:
        assert record.stats == first[record.name, record.step, record.call]
    assert len(frames[0]) == len(frames[1]) == 13 * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_outputs_raise_no_second_alert(reentrant):
    model = Checkpointed(reentrant)
    model.blocks[1].register_forward_hook(lambda m, a, out: out * torch.nan)
    with tap.track(model, alerts=[nan()]) as tracker:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        tracker.step()
    assert [alert.name for alert in tracker.alerts if alert.kind is ACT] == ["blocks.1"]


# -- parallel ------------------------------------------------------------------------------


class HasModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)  # the name that DataParallel uses as well

    def forward(self, x):
        return self.module(x)


def test_names_do_not_contain_data_parallel(found):
    model = nn.DataParallel(nn.Sequential(HasModule(), nn.Linear(4, 2)))
    opt = torch.optim.Adam(model.parameters())
    with tap.track(model, optimizer=opt) as tracker:
        model(torch.randn(3, 4)).sum().backward()
        opt.step()
        tracker.step()
    seen = found(tracker)
    assert seen.names(ACT) == ["0.module", "0", "1", "Sequential"]
    assert seen.names(WEIGHT) == seen.names(WGRAD) == [
        "0.module.weight", "0.module.bias", "1.weight", "1.bias",
    ]  # fmt: skip


def test_names_do_not_contain_inner_wrappers(found):
    model = nn.Sequential(
        nn.DataParallel(HasModule()), torch.compile(nn.Linear(4, 2), backend="eager")
    )
    with tap.track(model) as tracker:
        model(torch.randn(3, 4)).sum().backward()
        tracker.step()
    seen = found(tracker)
    assert set(seen.names(ACT)) == {"0.module", "0", "1", "Sequential"}
    assert "1.weight" in seen.names(WEIGHT)


# -- torch.compile -------------------------------------------------------------------------


def expected(x):
    model = mlp()
    with tap.track(model) as tracker:
        model(x).square().sum().backward()
        tracker.step()
    return {(r.kind, r.name): r.stats for r in tracker.records}


def ways(model, backend, fullgraph):
    """Return a model compiled by a wrapper, in place, and by a function that calls it."""
    in_place = mlp()
    in_place.compile(backend=backend, fullgraph=fullgraph)
    return {
        "wrapper": (torch.compile(model, backend=backend, fullgraph=fullgraph),) * 2,
        "in place": (in_place,) * 2,
        "function": (
            model, torch.compile(lambda x: model(x) * 1.0, backend=backend, fullgraph=fullgraph),
        ),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def compiler_for_other_files():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["wrapper", "in place", "function"])
@pytest.mark.parametrize("called", [True, False])
def test_observes_compiled_models(backend, way, called, found):
    x = torch.randn(3, 4)
    model, call = ways(mlp(), backend, False)[way]
    if called:
        call(x).square().sum().backward()
        model.zero_grad()
    with tap.track(model) as tracker:
        for _ in range(2):
            call(x).square().sum().backward()
            model.zero_grad()
            tracker.step()
    assert tracker.unseen == {}
    known = expected(x)
    seen = found(tracker)
    for n in range(2):
        now = {(r.kind, r.name): r.stats for r in seen.all if r.step == n}
        assert now == known
    frames = torch._dynamo.utils.counters["frames"]["total"]
    call(x)
    assert len(list(tracker.records)) == len(seen.all), frames


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["wrapper", "in place", "function"])
def test_reports_modules_in_a_fullgraph(backend, way, found, caplog):
    x = torch.randn(3, 4)
    model, call = ways(mlp(), backend, True)[way]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "tensortap"), tap.track(model, opt) as tracker:
        for _ in range(2):
            call(x).square().sum().backward()
            opt.step()
            opt.zero_grad()
            tracker.step()
    # the output of the graph is observed, unless the compiled function changes it
    hidden = {"0", "1", "2"} | ({"Sequential"} if way == "function" else set())
    assert set(tracker.unseen) == hidden
    assert all("fullgraph" in reason for reason in tracker.unseen.values())
    assert len([r for r in caplog.records if "tracking is limited for" in r.message]) == 1
    seen = found(tracker)
    assert set(seen.names(ACT)) == {"Sequential"} - hidden
    assert len(seen.of(WGRAD)) == len(seen.of(WEIGHT)) == 8
    assert len(seen.of(Kind.ALERT)) == len(hidden)
    assert {a.name for a in tracker.alerts if a.rule == "unseen"} == hidden


def test_alerts_of_a_run_report_modules_in_a_fullgraph(open_run):
    model = torch.compile(mlp(), backend="eager", fullgraph=True)
    with tap.track(model) as tracker:
        model(torch.randn(3, 4))
        tracker.step()
    tap.flush()
    alerts = tap.open(open_run).alerts()
    assert {a.name for a in alerts if a.rule == "unseen"} == {"0", "1", "2"}
    assert alerts == tracker.alerts


def test_fullgraphs_have_no_modules_and_reject_hooks():
    """The reason why modules in a fullgraph cannot be observed."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = torch.compile(mlp(), backend=backend, fullgraph=True)
    with tap.track(model):
        model(torch.randn(3, 4))
    assert [n for n in graphs[0].graph.nodes if n.op == "call_module"] == []
    assert [m for m in graphs[0].modules() if isinstance(m, nn.Linear)] == []
    seen = []
    hooked = mlp()
    hooked[0].register_forward_hook(torch.compiler.disable(lambda m, a, out: seen.append(out)))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(hooked, backend="eager", fullgraph=True)(torch.randn(3, 4))


def test_compiled_training_is_bit_identical():
    def train(tracked):
        torch._dynamo.reset()
        plain = mlp()
        model = torch.compile(plain, backend="aot_eager")
        opt = torch.optim.AdamW(model.parameters())
        tracker = tap.track(model, optimizer=opt)
        if tracked:
            tracker.__enter__()
        for n in range(4):
            torch.manual_seed(n)
            opt.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            opt.step()
            tracker.step()
        tracker.__exit__(None, None, None)
        return [p.detach().clone() for p in plain.parameters()]

    for one, other in zip(train(False), train(True), strict=True):
        assert torch.equal(one, other)


def test_compiling_while_tracking():
    """The compiler compiles no code of tensortap, and no hook once per module."""
    code = """
        import sys, torch, tensortap as tap
        from torch import nn
        model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(4, 4), nn.ReLU())])
        with tap.track(model) as tracker:
            assert "torch._dynamo" not in sys.modules
            call = torch.compile(model, backend="eager")
            for n in range(2):
                call(torch.randn(3, 4)).sum().backward()
                tracker.step()
        print(len([r for r in tracker.records if r.kind.value in ("Activation", "Gradient")]))
        from torch._dynamo.convert_frame import input_codes
        names = [code().co_filename for code in input_codes.seen if code()]
        print(any("tensortap" in name for name in names))
    """
    # not forked: the programs of other tests have the compiler from the start
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(13 * 2 * 2), "False"], done.stderr
    assert "recompile_limit" not in done.stderr
