"""`trace` of torch models: wrappers, compilers, modes, checkpoints and data loader workers."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tensortap as tap
from tensortap.core.errors import TensortapError
from tensortap.rooms.trace.instrument import instrumented

pytestmark = pytest.mark.usefixtures("no_errors")


def helper(z):
    w = z * 2
    return w  # noqa: RET504


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(4, 8)

    def forward(this, x):
        q, k = this.qkv(x).chunk(2, -1)
        scores = q @ k.transpose(-1, -2)
        scores = scores.softmax(-1)
        return scores @ x


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Attention(), Attention()])
        self.counter = 0

    def forward(self, x):
        self.counter += 1
        h = x
        for block in self.blocks:
            h = block(h)
        out = {"logits": helper(h), "all": [h, (h, 1)]}
        return out  # noqa: RET504


PATHS = [
    "forward", "forward.x", "blocks.*.forward.scores", "forward.out.logits", "forward.self.counter",
]  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def batches(n=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(n)]


def train(model, n=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in batches(n):
        loss = model(x)["logits"].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(tracer, n=3):
    found = tracer.results
    assert found["forward.x"].iterations == list(range(n))
    assert all(map(torch.equal, found["forward.x"].values, batches(n)))
    assert [set(one) for one in found["forward"].values] == [{"logits", "all"}] * n
    for block in (0, 1):
        scores = found[f"blocks.{block}.forward.scores"]
        assert scores.iterations == sorted([*range(n), *range(n)])
        assert not any(value.requires_grad for value in scores.values)
        assert torch.allclose(scores.values[1], scores.values[0].softmax(-1))
    logits = [one["logits"] for one in found["forward"].values]
    assert all(map(torch.equal, logits, found["forward.out.logits"].values))
    assert found["forward.self.counter"].values == list(range(n + 1))


def test_model(model):
    with tap.trace(model, PATHS) as tracer:
        train(model)
    check(tracer)
    assert instrumented() == []
    assert not model._forward_pre_hooks


def test_training_is_bit_identical(model):
    other = copy.deepcopy(model)
    with tap.trace(model, ["forward", "blocks.*.*", "forward.*", "blocks.*.qkv"], changed=False):
        torch.manual_seed(3)
        traced = train(model, 5)
        state = torch.get_rng_state()
    torch.manual_seed(3)
    assert train(other, 5) == traced
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


class TestWrappers:
    """A model and its wrapper can be traced alike."""

    def test_unknown_wrapper(self, model):
        class Engine(torch.nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module

            def forward(self, *args):
                return self.module(*args)

        model.blocks[1] = torch.nn.DataParallel(model.blocks[1])
        outer = Engine(torch.nn.DataParallel(Engine(model)))
        with tap.trace(outer, PATHS) as tracer:
            train(outer)
        check(tracer)

    def test_averaged_model_is_not_a_wrapper(self, model):
        averaged = torch.optim.swa_utils.AveragedModel(model)
        with tap.trace(averaged, ["forward.x"]) as tracer:
            train(model)  # the averaged module is a copy
            averaged(batches(1)[0])
        assert tracer.results["forward.x"].iterations == [0]

    @pytest.mark.slow
    def test_distributed(self, gloo):
        (found,) = gloo(DISTRIBUTED, world=1)
        assert found == {"inner": [3, 3, 3], "outer": [3, 3, 3], "sharded": [3, 3, 3]}


DISTRIBUTED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return y

def model():
    return nn.Sequential(Block(), Block())

def traced(target, trained):
    with tap.trace(target, ["*.forward.y", "0.fc"], changed=False) as tracer:
        for _ in range(3):
            trained(torch.randn(2, 4)).sum().backward()
    return [len(tracer.results[path].values) for path in ("0.forward.y", "1.forward.y", "0.fc")]

result = {}
inner = model()
outer = nn.parallel.DistributedDataParallel(inner)
result["inner"], result["outer"] = traced(inner, outer), traced(outer, outer)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
sharded = model()
fully_shard(sharded[1], mesh=init_device_mesh("cpu", (1,)))
fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
result["sharded"] = traced(sharded, sharded)
assert not tap.receipt().reasons["error"]
"""


@pytest.mark.slow
class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("way", ["wrapper", "module"])
    def test_compiled_modules_raise_at_once(self, model, way):
        code = Attention.forward.__code__
        target = torch.compile(model, backend="eager") if way == "wrapper" else model
        if way == "module":
            model.blocks[0].compile(backend="eager")
        advice = "runs inside a graph of torch.compile, where nothing is traced: trace the eager"
        with pytest.raises(TensortapError, match=f"blocks.0.forward.*{advice}"):
            tap.trace(target, "blocks.*.forward.scores").__enter__()
        assert Attention.forward.__code__ is code
        if way == "module":
            with tap.trace(target, "forward.x") as tracer:
                train(target)
            assert tracer.results["forward.x"].iterations == [0, 1, 2]

    def test_functions_in_graphs_are_reported(self, model, caplog):
        from torch._dynamo.utils import counters

        counters.clear()
        expected = train(copy.deepcopy(model))
        outer = torch.compile(model, backend="eager", fullgraph=True)
        paths = ["forward", "blocks.*.forward.scores"]
        with caplog.at_level(logging.WARNING, "tensortap"), tap.trace(model, paths) as tracer:
            assert train(outer) == expected
        assert not counters["graph_break"]
        assert not any(one.values for one in tracer.results.values())
        reason = "runs inside a graph of torch.compile, where nothing is traced"
        for name in ("forward", "blocks.0.forward", "blocks.1.forward"):
            assert f"tensortap: {name} {reason}" in caplog.text
        assert f"no value was kept for 'blocks.0.forward.scores': blocks.0.forward {reason}" in (
            caplog.text
        )


class TestModes:
    def run(self, model, **options):
        with tap.trace(model, ["forward.x"], changed=False, **options) as tracer:
            for x in batches(4):
                model.train()
                model(x)
                model.eval()
                with torch.no_grad():
                    model(x)
        return tracer.results["forward.x"].iterations

    def test_modes_are_counted_separately(self, model):
        assert self.run(model) == [0, 0, 1, 1, 2, 2, 3, 3]

    def test_intervals_count_the_traced_mode(self, model):
        sizes = []
        self.run(
            model, mode="train", gathering_interval=2,
            post_gather_callbacks=[lambda name, values, *_: sizes.append(len(values))],
        )  # fmt: skip
        assert sizes == [2, 2]

    def test_inference_mode(self, model):
        with torch.inference_mode(), tap.trace(model, ["forward.h"]) as tracer:
            model(batches(1)[0])
        (first, *_) = tracer.results["forward.h"].values
        assert not first.is_inference()


def test_method_outside_of_forward_counts_its_own_calls():
    class Lit(Model):
        def training_step(self, batch):
            loss = self(batch)["logits"].sum() + self(batch)["logits"].mean()
            return loss  # noqa: RET504

        def forward(self, x):
            x = self.prepared(x)
            return super().forward(x)

        def prepared(self, x):
            y = x + 1
            return y  # noqa: RET504

    model = Lit()
    paths = ["training_step.batch", "training_step.loss", "forward.x", "prepared.y"]
    with tap.trace(model, paths, changed=False, gathering_interval=4) as tracer:
        for batch in batches(3):
            model.training_step(batch)
        model.prepared(batches(1)[0])  # not called by forward
    assert tracer.results["training_step.batch"].iterations == [0, 1, 2]
    assert tracer.results["training_step.loss"].iterations == [0, 1, 2]
    assert tracer.results["forward.x"].iterations == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert tracer.results["prepared.y"].iterations[:6] == [0, 1, 2, 3, 4, 5]


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bn1 = torch.nn.BatchNorm1d(3)
        self.bn2 = torch.nn.BatchNorm1d(3)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.root = [self]  # objects may contain themselves

    def forward(self, x):
        return self.bn2(self.bn1(x)) * self.scale


def test_wildcards_in_modules_and_buffers():
    model = Normed()
    model.names = {"a": 1}
    with tap.trace(model, ["forward.self.*.running_var", "forward.self.*"]) as tracer:
        for _ in range(3):
            model(torch.randn(4, 3))
    found = tracer.results["forward.self.bn2.running_var"]
    assert found.iterations == [0, 1, 2]  # the value before each call
    assert torch.equal(found.values[0], torch.ones(3))
    assert set(tracer.results) == {
        "forward.self.bn1.running_var",
        "forward.self.bn2.running_var",
        "forward.self.scale",
        "forward.self.training",
        "forward.self.root",
        "forward.self.names",
    }  # fmt: skip  not the modules themselves
    with tap.trace(model, ["forward.self.*.*"]) as tracer:
        model(torch.randn(4, 3))
    assert {"forward.self.bn1.weight", "forward.self.names.a"} <= set(tracer.results)


def test_changes_are_found_whatever_mode_is_active():
    x = torch.ones(3)
    with tap.trace(helper, ["z"]) as tracer:
        with FlopCounterMode(display=False):
            helper(x)
        helper(x)
    assert tracer.results["z"].iterations == [0]


@pytest.mark.slow
def test_modules_of_torch(model):
    transformer = torch.nn.TransformerEncoderLayer(4, 2, batch_first=True, dropout=0.0)
    paths = ["self_attn", "self_attn.forward.attn_output", "linear1", "forward.x", "forward.src"]
    with tap.trace(transformer, paths) as tracer:
        transformer(torch.ones(1, 2, 4, requires_grad=True))
    found = {path: len(part.values) for path, part in tracer.results.items()}
    assert found["self_attn"] == 1
    assert found["self_attn.forward.attn_output"] >= 1
    assert found["linear1"] == found["forward.src"] == 1
    assert found["forward.x"] >= 2
    assert isinstance(tracer.results["self_attn"].values[0], tuple)


def test_wildcards_leave_out_methods_of_module_lists(model, caplog):
    with tap.trace(model, ["blocks.*", "blocks.*.*"]) as tracer:
        assert len(instrumented()) == 2  # Attention.forward, Linear.forward
        train(model, 1)
    assert set(tracer.results) == {"blocks.0", "blocks.1"} | {
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("qkv", "forward")
    }
    assert not caplog.records


def test_reports_empty_paths_of_a_pattern_once(model, caplog):
    model.unused = torch.nn.ModuleList([Attention(), Attention(), Attention()])
    with caplog.at_level(logging.WARNING, "tensortap"), tap.trace(model, ["*.*.*.scores"]):
        train(model, 1)
    (logged,) = [r.getMessage() for r in caplog.records]
    assert "for 'unused.0.forward.scores': unused.0.forward was never called" in logged
    assert "2 more paths of '*.*.*.scores'" in logged


def test_reports_how_to_trace_a_parameter(model, caplog):
    with caplog.at_level(logging.WARNING, "tensortap"), tap.trace(model, ["blocks.0.qkv.weight"]):
        pass
    assert "'blocks.0.qkv.forward.self.weight'" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_reports_torchscript_as_untraceable(caplog):
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.ReLU()))
    whole = torch.nn.Sequential(scripted, torch.nn.ReLU())
    with caplog.at_level(logging.WARNING, "tensortap"):
        with tap.trace(scripted, ["forward", "0.forward.input"]):
            scripted(torch.ones(2))
        assert caplog.text.count("TorchScript, which runs no Python") == 2
        with tap.trace(whole, ["0", "1"]) as tracer:
            whole(torch.ones(2))
        assert caplog.text.count("TorchScript, which runs no Python") == 3
    assert len(tracer.results["1"].values) == 1


def test_traced_model_can_be_pickled_and_copied(model, tmp_path):
    import pickle

    with tap.trace(model, ["forward.x", "blocks.0.forward.scores"]):
        model(batches(1)[0])
        copy.deepcopy(model)
        pickle.dumps(model)


def test_recomputation_of_a_checkpoint_is_not_kept_again():
    class Checked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Attention()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    model = Checked()
    with tap.trace(model, ["block.forward.scores"], changed=False) as tracer:
        for x in batches(2):
            model(x.requires_grad_()).sum().backward()
    assert tracer.results["block.forward.scores"].iterations == [0, 0, 1, 1]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        local = 3 * x**2
        return grad * local


def test_locals_of_a_backward_pass():
    with tap.trace(Cube.backward, ["local", "grad"]) as tracer:
        x = torch.tensor([2.0], requires_grad=True)
        Cube.apply(x).sum().backward()
    assert tracer.results["local"].values[0].tolist() == [12.0]
    assert tracer.results["grad"].values[0].tolist() == [1.0]


def test_function_decorated_by_torch():
    class Quiet(torch.nn.Module):
        @torch.no_grad()
        def forward(self, x):
            y = x + 1
            return y  # noqa: RET504

    model = Quiet()
    with tap.trace(model, ["forward.y", "forward"]) as tracer:
        model(torch.zeros(1))
    assert len(tracer.results["forward.y"].values) == len(tracer.results["forward"].values) == 1


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        item = torch.full((2,), float(index))
        return item  # noqa: RET504


def test_results_exclude_data_loader_workers(model, caplog):
    data = Numbers()
    with caplog.at_level(logging.WARNING, "tensortap"):
        with tap.trace(data, ["__getitem__.item"], gathering_interval=1) as tracer:
            loader = torch.utils.data.DataLoader(
                data, num_workers=2, multiprocessing_context="fork"
            )
            assert torch.cat(list(loader)).sum() == 12
        assert tracer.results["__getitem__.item"].values == []
        assert "in this process" in caplog.records[0].getMessage()
    with tap.trace(data, ["__getitem__.item"]) as tracer:
        assert len(list(torch.utils.data.DataLoader(data))) == 4
    assert len(tracer.results["__getitem__.item"].values) == 4


class TestFaultsOfOthers:
    """Errors that other tracers of local variables make."""

    def test_only_chosen_functions_are_instrumented(self, model):
        import sys

        code, helper_code = Model.forward.__code__, helper.__code__
        with tap.trace(model, ["blocks.0.forward.scores"]):
            assert sys.gettrace() is None
            assert sys.getprofile() is None
            assert Model.forward.__code__ is code
            assert helper.__code__ is helper_code
            train(model)

    def test_containers_of_non_leaf_tensors(self, model):
        with tap.trace(model, ["forward.out", "forward.out.all"]) as tracer:
            train(model)
        (first, *_) = tracer.results["forward.out"].values
        assert not first["logits"].requires_grad
        assert not first["all"][1][0].requires_grad
        assert torch.equal(first["all"][0], first["all"][1][0])

    def test_arguments_are_copied_before_in_place_changes(self):
        class InPlace(torch.nn.Module):
            def forward(self, x):
                x.add_(1)
                y = x
                y.mul_(2)
                return y

        with tap.trace(model := InPlace(), ["forward.x", "forward.y", "forward"]) as tracer:
            model(torch.zeros(1))
        kept = [
            tracer.results[path].values[0].item() for path in ("forward.x", "forward.y", "forward")
        ]
        assert kept == [0.0, 1.0, 2.0]


class TestTracedByTransformations:
    @pytest.fixture(autouse=True)
    def no_errors(self):
        """These tests expect errors."""

    def test_reports_functions_that_jax_only_traces(self, caplog):
        import jax
        import jax.numpy as jnp

        def step(x):
            y = x * 2
            return y  # noqa: RET504

        with caplog.at_level(logging.WARNING, "tensortap"), tap.trace(step, ["y"]) as tracer:
            assert float(jax.jit(step)(jnp.float32(2))) == 4
        assert tracer.results["y"].values == []
        assert any("JAX only traces" in record.getMessage() for record in caplog.records)
        with tap.trace(step, ["y"]) as tracer:
            step(jnp.float32(2))
        assert isinstance(tracer.results["y"].values[0], jax.Array)

    def test_reports_vmap_of_torch(self, caplog):
        def step(x):
            mapped = x * 2
            return mapped  # noqa: RET504

        with caplog.at_level(logging.WARNING, "tensortap"), tap.trace(step, ["mapped"]):
            assert torch.func.vmap(step)(torch.ones(3)).tolist() == [2, 2, 2]
        logged = [record.getMessage() for record in caplog.records]
        assert len(logged) == 2
        assert all("inside torch.func" in text for text in logged)
