"""Models and functions that torch.compile compiles: everything is seen, and no graph breaks."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tensortap as tap
from tensortap.alerts import nan
from tensortap.capture import catch as catching
from tensortap.capture.pipeline import Pipeline
from tensortap.capture.queue import Queue
from tensortap.core.record import Kind
from tensortap.rooms.track.memory import MemorySink
from tests.ops.test_torch_origins import alerts_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_errors"),
    # warnings that the compiler itself triggers
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]

ACT, GRAD, WEIGHT, WGRAD = (
    Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT, Kind.WEIGHT_GRADIENT,
)  # fmt: skip


class Layer(nn.Sequential):
    """torch does not compile its own modules in place."""

    def forward(self, x):
        return super().forward(x)


def mlp():
    torch.manual_seed(0)
    return Layer(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def deep(layers=2):
    torch.manual_seed(0)
    return Layer(*[Layer(nn.Linear(4, 4), nn.ReLU()) for _ in range(layers)])


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr("tensortap.rooms.track.torch.internals._known_graphs", 0)
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def graphs(counters):
    assert not counters["graph_break"], counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def step(call, x):
    call(x).square().sum().backward()


def seen(tracker):
    """Statistics by kind, name, step, call and whether a checkpoint computed them again."""
    return {
        (r.kind, r.name, r.step, r.call, "recompute" in r.tags): r.stats for r in tracker.records
    }


def tracked(model, call, *inputs, **options):
    """Track a step per input; return the tracker."""
    with tap.track(model, **options) as tracker:
        for x in inputs:
            step(call, x)
            model.zero_grad()
            tracker.step()
    return tracker


# -- ways to compile -----------------------------------------------------------------------


def ways(backend, fullgraph):
    """Return models compiled by a wrapper, in place, by parts, and by a function that calls one."""
    options = {"backend": backend, "fullgraph": fullgraph}
    model, in_place, regional = deep(), deep(), deep()
    in_place.compile(**options)
    for layer in regional:
        layer.compile(**options)
    return {
        "wrapper": (torch.compile(model, **options),) * 2,
        "in place": (in_place,) * 2,
        "regional": (regional,) * 2,
        "function": (model, torch.compile(lambda x: model(x) * 1.0, **options)),
    }


@pytest.mark.parametrize(
    ("way", "backend", "fullgraph", "called"),
    [
        ("wrapper", "aot_eager", True, False),
        ("regional", "aot_eager", True, False),
        ("in place", "eager", False, True),
        ("function", "eager", False, True),
    ],
)
def test_observes_every_module_without_a_break(backend, way, fullgraph, called, counters, caplog):
    x = torch.randn(3, 4)
    model, call = ways(backend, fullgraph)[way]
    alone = 2 if way == "regional" else 1
    if called:
        step(call, x)
        model.zero_grad()
        assert graphs(counters) == alone
    with caplog.at_level("WARNING", "tensortap"):
        tracker = tracked(model, call, x, x)
    assert tracker.unseen == {}
    assert graphs(counters) == (2 * alone if called else alone)
    assert ("compiles existing graphs anew" in caplog.text) == called
    plain = deep()
    assert seen(tracker) == seen(tracked(plain, plain, x, x))
    before = len(tracker.records)
    call(x)
    assert len(tracker.records) == before


def test_graphs_of_others_are_not_compiled_anew(counters, caplog):
    other = torch.compile(lambda x: x * 2 + 1, backend="eager")
    other(torch.ones(3))
    assert graphs(counters) == 1
    model = torch.compile(deep(), backend="eager")
    with caplog.at_level("INFO", "tensortap"), tap.track(model):
        pass
    other(torch.ones(3))
    assert graphs(counters) == 1
    assert "anew" not in caplog.text


@pytest.mark.parametrize(("include", "extra"), [(None, 0), ("^[02]", 1)])
def test_blocks_share_their_graphs(include, extra, counters):
    """A graph serves all modules of a class, unless only some of them are observed."""
    x, found = torch.randn(3, 4), []
    for way in ("alone", "tracked", "expected"):
        counters.clear()
        model = deep(4)
        for layer in model if way != "expected" else ():
            layer.compile(backend="eager", fullgraph=True)
        if way == "alone":
            step(model, x)
            alone = graphs(counters)
        else:
            found.append(seen(tracked(model, model, x, x, include=include)))
            assert way == "expected" or graphs(counters) == alone + extra
    assert found[0] == found[1]


def test_a_model_that_is_not_tracked_hides_no_other(counters):
    x, student, teacher = torch.randn(3, 4), deep(), deep()
    calls = [torch.compile(model, backend="eager") for model in (student, teacher)]
    with tap.track(student) as tracker:
        calls[1](x)
        step(calls[0], x)
    assert len([r for r in tracker.records if r.kind is ACT]) == 7
    assert torch._dynamo.config.skip_nnmodule_hook_guards


def test_selection_and_values(counters):
    """`include`, `tensors`, `stash` and alerts as without a compiler."""
    x = torch.randn(3, 4)
    found = []
    for compiled in (False, True):
        model = mlp()
        model[1].register_forward_hook(lambda m, a, out: out * torch.nan)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        tracker = tracked(
            model, call, x, include="^(0|1|Layer)$", tensors="0", alerts=[nan()],
            stash=lambda value: {"most": float(value.max())}, kind=("activation", "gradient"),
        )  # fmt: skip
        alerts = [(a.name, a.kind, a.step) for a in tracker.alerts if a.rule == "nan"]
        rows = [
            (r.kind, r.name, repr(r.stats), repr(r.value)) for r in tracker.records
            if r.kind in (ACT, GRAD)
        ]  # fmt: skip
        found.append((alerts, rows))
    assert found[0] == found[1]
    assert found[0][0]
    assert "2" not in {name for _, name, *_ in found[0][1]}
    assert any(value != "None" for *_, value in found[0][1])
    assert graphs(counters) == 1


def test_first_module_with_a_gradient_that_is_not_finite_is_named(counters):
    """Nothing looks into graphs for the code between two modules that made it."""
    first, *_ = alerts_of("backward", compiled=lambda model: [model])
    assert (first.name, first.kind, first.origin) == ("attn.q", GRAD, "attn.o_proj")
    assert "its backward pass, or an operation between the two, made it" in first.message
    assert not counters["graph_break"]


# -- what models do ------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple


class Outputs(nn.Module):
    """Outputs of many kinds, some changed in place, some that are inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.same, self.inplace = nn.Linear(4, 4), nn.Identity(), nn.ReLU(inplace=True)
        self.pair, self.data = Pair(), Data()
        self.frozen = nn.Dropout(0.0)

    def forward(self, x):
        x = self.inplace(self.first(self.same(x)))
        both = self.pair(self.same(x))
        out = self.data(*both["sum"])
        return self.frozen(out.logits) + out.hidden[0]


class Pair(nn.Module):
    def forward(self, x):
        return {"sum": [x + 1, x * 2], "ids": torch.arange(3)}


class Data(nn.Module):
    def forward(self, x, y):
        return Output(x - y, (x, None))


def policy(context, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    def __init__(self, selective):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(mlp() for _ in range(2))
        self.options = {}
        if selective:
            self.options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.options)
        return x


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (Outputs, "aot_eager"),
        (lambda: Checkpointed(selective=False), "eager"),
        (lambda: Checkpointed(selective=True), "aot_eager"),
    ],
)
def test_everything_is_seen_as_without_a_compiler(make, backend, counters):
    x = torch.randn(3, 4, requires_grad=True)
    found = []
    for compiled in (False, True):
        model = make()
        call = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        all_seen = seen(tracked(model, call, x, x))
        found.append({key[:4]: stats for key, stats in all_seen.items() if not key[4]})
    assert found[0] == found[1]
    assert graphs(counters) == 1


def test_gradient_accumulation(counters):
    """Each gradient belongs to its own call."""
    inputs = [torch.full((3, 4), n + 1.0) for n in range(2)]
    found = []
    for compiled in (False, True):
        model = mlp()
        call = torch.compile(model, backend="aot_eager") if compiled else model
        with tap.track(model) as tracker:
            sum(call(x).square().sum() for x in inputs).backward()
            tracker.step()
            for x in inputs:
                step(call, x)
            tracker.step()
        found.append(seen(tracker))
    assert found[0] == found[1]
    assert graphs(counters) == 1


def test_the_backward_pass_saves_the_same_tensors():
    """Saving others would round 16-bit floats in other places."""
    found = []
    for kind in (("activation", "gradient"), "weight"):
        torch._dynamo.reset()
        model = Layer(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16()
        call = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
        with tap.track(model, kind=kind) as tracker:
            output = call(torch.randn(16, 8).bfloat16())
            saved = [tuple(tensor.shape) for tensor in output.grad_fn.saved_tensors]
            output.sum().backward()
            tracker.step()
        found.append(sorted(shape for shape in saved if shape))  # probes are without
    assert found[0] == found[1]


class Descent(torch.optim.Optimizer):
    """Steps in one graph; steps of torch's own optimizers break it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad * 0.1)


@pytest.mark.parametrize(("make", "fullgraph"), [(torch.optim.Adam, False), (Descent, True)])
def test_compiled_steps_of_optimizers(make, fullgraph, counters, caplog):
    def train(track):
        torch._dynamo.reset()
        counters.clear()
        model = mlp()
        optimizer = make(model.parameters())
        update = torch.compile(lambda: optimizer.step(), backend="aot_eager", fullgraph=fullgraph)
        with tap.track(model, optimizer=optimizer, alerts=True, every=track) as tracker:
            for _ in range(10):
                step(model, torch.ones(2, 4))
                update()
                optimizer.zero_grad()
                tracker.step()
        return tracker, list(model.parameters()), dict(counters["stats"])

    plain, tracked = train(1000), train(1)
    assert all(map(torch.equal, plain[1], tracked[1]))
    assert plain[2] == tracked[2]  # nothing of ours was compiled
    assert "recompile_limit" not in caplog.text
    tracker = tracked[0]
    assert len([r for r in tracker.records if r.kind is WGRAD]) == 10 * 4
    assert ("fullgraph" in tracker.unseen.get("optimizer", "")) == fullgraph


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        logits = self.layer(x)
        return logits, logits.square().sum()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_autograd(fullgraph):
    from torch._dynamo import compiled_autograd

    model = WithLoss()
    call = torch.compile(model, backend="aot_eager")
    compiler = torch.compile(backend="aot_eager", fullgraph=fullgraph)
    with tap.track(model, alerts=True) as tracker:
        for _ in range(2):
            with compiled_autograd._enable(compiler):
                call(torch.ones(2, 4))[1].backward()
            tracker.step()
    gradients = {r.name for r in tracker.records if r.kind is GRAD}
    assert gradients or "gradients" in tracker.unseen
    missing = {"WithLoss[0]", "WithLoss[1]", "layer"} - gradients
    assert not missing or tracker.unseen.keys() & (missing | {"gradients"})


def test_exported_programs_have_no_operators():
    model = mlp()
    with tap.track(model):
        program = torch.export.export(model, (torch.randn(3, 4),))
    assert "tensortap" not in str(program.graph)


def test_tracking_begins_before_the_compiler_is_loaded():
    """As many graphs as without tracking, also where the program breaks them."""
    code = """
        import sys, torch, tensortap as tap
        from torch import nn
        class Breaking(nn.Module):
            def forward(self, x):
                torch._dynamo.graph_break()
                return x + 1
        def breaking():
            layers = [m for _ in range(6) for m in (nn.Linear(4, 4), nn.ReLU(), Breaking())]
            return nn.Sequential(*layers)
        def graphs(model, on):
            tracker = tap.track(model, kind=("activation", "gradient"))
            if on:
                tracker.__enter__()
                assert ("torch._dynamo" in sys.modules) == loaded
            call = torch.compile(model, backend="aot_eager")
            from torch._dynamo.utils import counters
            counters.clear()
            for n in range(2):
                call(torch.randn(3, 4)).sum().backward()
                tracker.step()
            tracker.__exit__(None, None, None)
            found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            torch._dynamo.reset()
            return found, len(tracker.records) // (2 * 2), tracker.unseen
        loaded = False
        tracked = graphs(breaking(), True)
        from torch._dynamo.convert_frame import input_codes
        names = [code().co_filename for code in input_codes.seen if code()]
        print(any("tensortap" in name for name in names))
        loaded = True
        again, alone = graphs(breaking(), True), graphs(breaking(), False)
        print(tracked[0] == again[0] == alone[0], tracked[1:], alone[0], again[0], tracked[0])
    """
    # not forked: the programs of other tests have the compiler from the start
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("False\nTrue (19, {})"), done.stdout + done.stderr
    assert "recompile_limit" not in done.stderr


# -- catch ---------------------------------------------------------------------------------


@pytest.fixture
def caught(monkeypatch):
    """Return a function that gives what was caught: name, step, call and value."""
    fresh = Pipeline()
    sink = MemorySink(1 << 30, fresh.ledger)
    fresh.attach(Queue(sink, budget=1 << 30, name="test"))
    monkeypatch.setattr(catching, "pipeline", fresh)

    def records():
        fresh.flush()
        return [
            (r.name, r.step, r.call, tap.rooms.watch.array_of(r).tolist()) for r in sink.records
        ]

    yield records
    fresh.close()


def test_catch(caught, counters):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        hidden = x * 2
        tap.catch(hidden, "h")
        tap.catch(hidden, "second", every=2)
        tap.catch(hidden, "first", first=1)
        tap.catch(hidden, "large", when=lambda value: value.sum() > 5)
        tap.catch(hidden, "large too", when=hidden.sum() > 5)
        tap.catch(hidden > 3, "changed", changed=True)
        tap.catch(hidden.sum())
        return hidden + 1

    for n in range(3):
        function(torch.full((2,), float(n), requires_grad=True)).sum().backward()
        tap.step()
    found = caught()
    assert [one[1:] for one in found if one[0] == "h"] == [(n, 0, [2.0 * n] * 2) for n in range(3)]
    assert [one[1] for one in found if one[0] == "second"] == [0, 2]
    assert [one[1] for one in found if one[0] == "first"] == [0]
    assert [one[1] for one in found if one[0].startswith("large")] == [2, 2]
    assert [one[1] for one in found if one[0] == "changed"] == [0, 2]
    assert [one[3] for one in found if one[0] == "hidden.sum()"] == [0.0, 4.0, 8.0]
    assert graphs(counters) == 1


def test_catch_grad(caught, counters):
    def function(x):
        hidden = tap.catch_grad(x * 2, "h")
        tap.catch_grad(hidden, every=2)
        return hidden.square().sum()

    found = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        for n in range(2):
            call(torch.full((2,), float(n), requires_grad=True)).backward()
        found.append(caught()[sum(map(len, found)) :])
    assert [one[0] for one in found[0]] == ["h", "hidden.grad", "h"]
    assert sorted(one[3] for one in found[0]) == sorted(one[3] for one in found[1])
    assert {one[0] for one in found[1]} == {"h", "hidden.grad"}
    assert graphs(counters) == 1


class LogGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        tap.catch(gradient, "gradient")
        return gradient


def test_operators_in_the_backward_pass_alone_as_in_pytorch_172248(caught, counters):
    call = torch.compile(lambda x: LogGradient.apply(x).sin(), backend="aot_eager", fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    call(x).backward(torch.tensor([2.0, 3.0]))
    assert [(name, value) for name, _, _, value in caught()] == [
        ("gradient", (torch.tensor([2.0, 3.0]) * torch.ones(2).cos()).tolist())
    ]
    assert x.grad.tolist() == caught()[0][3]
    assert graphs(counters) == 1


def test_catch_takes_only_tensors_in_graphs(caught, caplog):
    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        tap.catch({"x": x}, "dict")
        return x + 1

    with caplog.at_level("WARNING", "tensortap"):
        function(torch.ones(2))
    assert "only tensors are captured, not a dict" in caplog.text


# -- several processes ---------------------------------------------------------------------

PARALLEL = """
from torch._dynamo.utils import counters

class Layer(nn.Sequential):
    def forward(self, x):
        return super().forward(x)

def model():
    torch.manual_seed(0)
    return Layer(*[Layer(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])

def split(net):  # torch would compile each bucket of gradients on its own
    for layer in net:
        layer.append(nn.Linear(4, 70000, bias=False))
        layer.append(nn.Linear(70000, 4, bias=False))
    return nn.parallel.DistributedDataParallel(net)

def fsdp2(net):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2,))
    for layer in (*net, net):
        fully_shard(layer, mesh=mesh)
    return net

def compiled(net, way, parallel):
    if way == "regional":
        for layer in net:
            layer.compile(backend="aot_eager", fullgraph=True)
    net = parallel(net)
    return torch.compile(net, backend="aot_eager") if way == "whole" else net

def graphs(on, way, parallel):
    torch._dynamo.reset()
    counters.clear()
    net = compiled(model(), way, parallel)
    tracker = tap.track(net)
    if on:
        tracker.__enter__()
    for n in range(2):
        net(torch.full((3, 4), rank + n + 1.0)).square().sum().backward()
        net.zero_grad()
        tracker.step()
    tracker.__exit__(None, None, None)
    seen = {
        f"{r.kind.value} {r.name} {r.step}": r.stats.mean for r in tracker.records
        if r.kind.value in ("Activation", "Gradient")
    }
    breaks = sum(counters["graph_break"].values())
    return counters["stats"]["unique_graphs"], breaks, seen, tracker.unseen

result = {}
for parallel, way in ((split, "whole"), (fsdp2, "regional")):
    expected = graphs(True, "eager", parallel)[2]
    result[f"{parallel.__name__} {way}"] = (
        graphs(False, way, parallel)[:2], graphs(True, way, parallel), expected,
    )
result["errors"] = tap.receipt().reasons["error"]
"""


def test_parallel_models(gloo):
    for result in gloo(PARALLEL):
        assert result.pop("errors") == 0
        for way, (alone, (graphs, breaks, seen, unseen), expected) in result.items():
            assert [graphs, breaks] == alone, way
            assert seen == pytest.approx(expected), way
            assert len(seen) == (11 if way.startswith("split") else 7) * 2 * 2
            assert unseen == {}


# -- Inductor ------------------------------------------------------------------------------


def test_weights_are_tracked_without_operators():
    """So the bits of a compiled model without any can be compared."""
    model, found = mlp(), []

    def backend(graph, inputs):
        found.append(str(graph.graph))
        return graph.forward

    call = torch.compile(model, backend=backend, fullgraph=True)
    for kind in (None, "weight"):
        tracker = tracked(model, call, torch.randn(3, 4), kind=kind)
        assert {r.name for r in tracker.records if r.kind is WEIGHT} == dict(
            model.named_parameters()
        ).keys()
    assert ["tensortap" in graph for graph in found] == [True, False]


class Tied(nn.Module):
    """A language model with tied weights that returns logits and a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 24)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, targets):
        x = self.embed(ids)
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("compiled_backward", [False, True])
def test_inductor(compiled_backward, counters):
    from torch._dynamo import compiled_autograd

    def train(compiled, track):
        torch._dynamo.reset()
        counters.clear()
        model = Tied()
        call = torch.compile(model) if compiled else model
        backward = torch.compile() if compiled_backward and compiled else None
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with tap.track(model, opt, every=1 if track else 1000, init_step=1) as tracker:
            for _ in range(0 if track else 1):  # the first step is always recorded
                tracker.step()
            for n in range(3):
                ids = torch.randint(12, (2, 2, 5), generator=torch.Generator().manual_seed(n))
                with compiled_autograd._enable(backward) if backward else torch.enable_grad():
                    call(*ids)[1].backward()
                opt.step()
                opt.zero_grad()
                tracker.step()
        return tracker, list(model.parameters())

    tracker, weights = train(compiled=True, track=True)
    if not compiled_backward:
        assert graphs(counters) == 1
    assert all(map(torch.equal, weights, train(compiled=True, track=False)[1]))
    found, expected = seen(tracker), seen(train(compiled=False, track=True)[0])
    missing = {name for _, name, *_ in expected.keys() - found.keys()}
    assert missing == set(tracker.unseen) == {"Tied[0]"}
    for key in found.keys() & expected.keys():
        assert found[key].mean == pytest.approx(expected[key].mean, abs=1e-5), key
