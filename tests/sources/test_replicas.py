"""Replicas that several ranks have are compared while they train, with gloo."""

import os

import pytest

# the figures in the docs are of 100 trials and 1,000 clean steps
TRIALS, CLEAN = os.environ.get("REPLICA_TRIALS", "6"), os.environ.get("REPLICA_CLEAN", "6")
pytestmark = pytest.mark.slow

_PROGRAM = """
import random
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tensortap import alerts

TRIALS, CLEAN = int(os.environ["TRIALS"]), int(os.environ["CLEAN"])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU()
        self.down, self.head = nn.Linear(32, 16), nn.Linear(16, 4, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.full((16,), 0.5))
        self.batch = nn.BatchNorm1d(16)
    def forward(self, x):
        x = self.batch(self.down(self.act(self.up(self.norm(x)))) * self.scale)
        return self.head(x.bfloat16())

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def tensors(model, opt, skip):
    # by name: whatever several ranks have
    model = model.module if hasattr(model, "module") else model
    found = {(n, "Weight"): p for n, p in model.named_parameters()}
    found["scale", "Value"] = model.scale
    for n, p in model.named_parameters():
        for key, value in opt.state[p].items():
            found[f"{n}.{key}", "Optimiser_State"] = value
    found = {key: local(t.detach()) for key, t in found.items() if not key[0].startswith(skip)}
    return {key: t for key, t in found.items() if t.numel()}

def flip(tensor, element, bit):
    # a view of the same memory, so it changes the tensor in place
    size = tensor.element_size()
    assert tensor.is_contiguous()
    data = tensor.view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
    data.view(-1)[element * size + bit // 8] ^= 1 << bit % 8

def train(model, skip=()):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    draw = random.Random(7)  # the same on all ranks
    torch.manual_seed(rank)
    expected, sums = [], []
    rule = alerts.replicas(every=1)
    off = dict.fromkeys(("activations", "gradients", "weights", "optimizer_state"), False)
    with tap.track(model, optimizer=opt, alerts=[rule], **off) as tracker:
        for step in range(2 * TRIALS + CLEAN):
            model(torch.randn(4, 16) + rank).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
            trial = None
            if step >= 2 and step % 2 == 0 and step < 2 * TRIALS + 2:
                named = tensors(model, opt, skip)
                name, kind = draw.choice(sorted(named))
                tensor = named[name, kind]
                victim = draw.randrange(world)
                element = draw.randrange(1 << 20) % tensor.numel()
                bit = draw.randrange(8 * tensor.element_size())
                trial = step, victim, name, kind, bit
                expected.append(trial)
                if victim == rank:
                    flip(tensor, element, bit)
            tracker.step()
            if trial and victim == rank:
                flip(tensor, element, bit)
    found = [(a.step, a.rank, a.name, a.kind.value, a.facts.get("bit")) for a in tracker.alerts]
    messages = [a.message for a in tracker.alerts]
    return dict(expected=expected, found=found, messages=messages, unseen=tracker.unseen)

def ddp():
    torch.manual_seed(0)
    return train(nn.parallel.DistributedDataParallel(Net()))

def hsdp():
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (model.up, model.down, model.head, model):
        fully_shard(module, mesh=mesh)
    return train(model)

def tensor_parallel():
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (world,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    model.batch = nn.Identity()
    model.forward = lambda x: Net.forward(model, x - rank)  # all ranks need the same batch
    torch.randn = lambda *size: torch.ones(*size)
    return train(model, skip=("up", "down.weight"))

result = {each.__name__: each() for each in (ddp, hsdp, tensor_parallel)}
result["errors"] = tap.receipt().reasons["error"]
"""


@pytest.fixture(scope="module")
def found(gloo):
    """What eight ranks have found; they run all programs one after the other."""
    return gloo(_PROGRAM, world=8, TRIALS=TRIALS, CLEAN=CLEAN)


@pytest.mark.parametrize("layout", ["ddp", "hsdp", "tensor_parallel"])
def test_one_flipped_bit_is_named(found, layout):
    expected = found[0][layout]["expected"]
    assert len(expected) == int(TRIALS)
    alerts = sorted(alert for results in found for alert in results[layout]["found"])
    assert alerts == sorted(expected)
    assert {results["errors"] for results in found} == {0}


_TWO = """
import contextlib, time
from tensortap import alerts

def found_by_all(tracker, count):
    # the first rank finds them, in a thread of its own; a step here is shorter than a message
    while tracker._observer._alerts._replicas._queue.qsize() > 4:
        time.sleep(0.001)
    found = torch.tensor(len([a for a in tracker.alerts if a.rule == "replicas"]))
    dist.broadcast(found, 0)
    return found >= count

def without_majority():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt, alerts=True, init_step=30) as tracker:
        for step in range(30, 100_000):
            model(torch.ones(2, 4)).sum().backward()
            opt.step()
            opt.zero_grad()
            if step == 38 and rank == 1:
                model.module.weight.data[2, 1:] += 1
            tracker.step()
            if found_by_all(tracker, 2):
                break
    return [[a.message, a.step, a.rank] for a in tracker.alerts if a.rule == "replicas"]

def models_of_their_own():
    # they differ from the beginning, as nobody has said that they are replicas
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt, alerts=[alerts.replicas(every=1)]) as tracker:
        for step in range(3):
            model(torch.randn(2, 4)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            tracker.step()
    return [str(a) for a in tracker.alerts]

def one_rank_tracks():
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3)))
    if rank:
        return []
    with tap.track(model, alerts=[alerts.replicas(every=1)]) as tracker:
        tracker.step()
    return [str(a) for a in tracker.alerts]

def buffers():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    model.register_buffer("scale", torch.ones(3))
    model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    with tap.track(model, alerts=[alerts.replicas(every=1)]) as tracker:
        for step in range(100_000):
            if step == 3 and rank == 1:
                model.module.scale += 1
            tracker.step()
            if found_by_all(tracker, 1):
                break
    return [[a.name, a.rank, a.message] for a in tracker.alerts]

def correct():
    # no rule speaks up, whatever the ranks do together
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    model = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
    torch.manual_seed(rank)
    with tap.track(model, optimizer=opt, alerts=True) as tracker:
        for step in range(25):
            opt.zero_grad()
            for last in (False, True):
                with contextlib.nullcontext() if last else model.no_sync():
                    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
                    (nn.functional.cross_entropy(model(x), y) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            schedule.step()
            model.eval()
            with torch.no_grad():
                model(torch.randn(8, 4))
            model.train()
            tracker.step()
    return [str(each) for each in (*tracker.alerts, *tracker.hints)]

def stored():
    path = tap.init(os.environ["RUNS"])
    found = without_majority()
    tap.finish()
    run = tap.open(path)
    return [found, [[a.message, a.step, a.rank] for a in run.alerts() if a.rule == "replicas"]]

result = {each.__name__: each() for each in
          (without_majority, models_of_their_own, one_rank_tracks, stored, buffers, correct)}
result["errors"] = tap.receipt().reasons["error"]
"""


def test_two_ranks(gloo, tmp_path):
    first, second = gloo(_TWO, RUNS=str(tmp_path / "runs"))
    message = (
        "weight differs between rank 0 and rank 1 since step 40, without a majority; "
        "several of 12 elements differ"
    )
    for alerts in (first["without_majority"], *first["stored"]):
        assert alerts[0] == [message, 40, 1]
        ((_, step, rank),) = alerts[1:]
        assert alerts[1][0] == (
            f"3 of 12 elements differ between rank 0 and rank 1 at step {step}, the first is [2, 1]"
        )
        assert (rank, step > 40, step % 10) == (1, True, 0)
    assert first["stored"][0] == first["stored"][1]
    assert second["without_majority"] == []
    assert first["buffers"][0][:2] == ["scale", 1]
    assert first["buffers"][0][2].startswith("scale differs between rank 0 and rank 1 since step 3")
    for found in (first, second):
        assert found["correct"] == []
        assert found["models_of_their_own"] == found["one_rank_tracks"] == []
        assert found["errors"] == 0


_DIES = """
import time
from tensortap import alerts
from tensortap.sources import replicas
replicas._PATIENCE, replicas._LAST_PATIENCE = 0.5, 0.2

torch.manual_seed(0)
model = nn.Linear(4, 3)
with tap.track(model, alerts=[alerts.replicas(every=1)]) as tracker:
    if rank:
        tracker.step()
        tracker._observer._alerts._replicas.close()  # returns when everything is sent
    dist.barrier()
    if rank == 2:
        os._exit(0)
    deadline = time.monotonic() + 200
    while rank == 0 and not any(a.rule == "silent" for a in tracker.alerts):
        assert time.monotonic() < deadline
        tracker.step()
        time.sleep(0.02)
print(json.dumps([str(a) for a in tracker.alerts]))
"""


def test_a_rank_that_dies_is_silent_and_hangs_nobody(gloo):
    printed = gloo.printed(_DIES, 3)
    assert "rank 2 is silent: its last replicas are of step 0" in printed[0]  # and so is rank 1
    assert printed[1].strip() == "[]"


_INPUTS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tensortap import alerts

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
off = dict.fromkeys(("activations", "gradients", "weights", "optimizer_state"), False)

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

def found(net, train, **options):
    with tap.track(net, alerts=[alerts.replicas(every=2)], **off) as tracker:
        for step in range(12):
            train(net, step)
            tracker.step()
    return [[a.rule, a.name, a.step, a.message] for a in tracker.alerts]

def tensor_parallel(compiled=False):
    net = model()
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if compiled:
        net.compile(backend="eager")
    def train(net, step):
        torch.manual_seed(100 * step + rank // 2)  # each data-parallel rank has its own batch
        batch = torch.randn(4, 8)
        if rank == 3 and step >= 5:
            batch[2, 7] = batch[2, 7] + 1
        net(batch).sum().backward()
        batch.zero_()
    return found(net, train)

def train_on(seed):
    def train(net, step):
        net.eval()
        with torch.no_grad():
            net(torch.full((2, 8), float(step)))  # all ranks may evaluate on the same data
        net.train()
        torch.manual_seed(seed(step))
        net(torch.randn(4, 8)).square().sum().backward()
        net.zero_grad()
    return train

def parallel(seed):
    return found(nn.parallel.DistributedDataParallel(model()), train_on(seed))

def sharded(seed):
    return found(fully_shard(model(), mesh=mesh["dp"]), train_on(seed))

def pipeline():
    torch.manual_seed(0)
    stage = PipelineStage(nn.Linear(8, 8), rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: out.sum())
    received, now = stage._retrieve_recv_activations, [0]
    def wrong(*args):
        values = received(*args)
        if rank == 2 and now[0] >= 5:
            values[0].data[0, 3] += 1
        return values
    stage._retrieve_recv_activations = wrong
    def train(_, step):
        now[0] = step
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        schedule.step(*([x] if rank == 0 else []), target=x)
    return found(stage.submod, train)

result = {
    "tensor_parallel": tensor_parallel(), "compiled": tensor_parallel(compiled=True),
    "forgotten": parallel(lambda step: step), "fixed": parallel(lambda step: 100 * step + rank),
    "one batch": parallel(lambda step: 0),
    "two alike": parallel(lambda step: 100 * step + max(rank, 1)),
    "sharded": sharded(lambda step: step), "sharded fixed": sharded(lambda step: 100 * step + rank),
    "pipeline": pipeline(), "errors": tap.receipt().reasons["error"],
}
"""


@pytest.fixture(scope="module")
def inputs(gloo):
    """The alerts of four ranks about what their models are called with."""
    found = gloo(_INPUTS, world=4)
    assert {each.pop("errors") for each in found} == {0}
    return {name: [alert for each in found for alert in each[name]] for name in found[0]}


@pytest.mark.parametrize("program", ["tensor_parallel", "compiled"])
def test_ranks_that_share_a_batch_get_the_same_inputs(inputs, program):
    """Inputs of data-parallel ranks rightly differ; those of tensor-parallel ranks do not."""
    ((rule, name, step, message),) = inputs[program]
    assert (rule, name, step) == ("replicas", "input[0]", 6)
    assert message.startswith(
        "input[0] differs between rank 2 and rank 3 since step 6, without a majority; "
        "1 of 32 elements differs: "
    )
    assert message.endswith("element [2, 7]")


def test_data_parallel_ranks_get_different_batches(inputs):
    message = (
        "all 4 ranks have been called with the same batches since step 0, and compute the same "
        "gradients: give each rank its own part of the data, with DistributedSampler or a seed "
        "that depends on the rank"
    )
    assert inputs["forgotten"] == [["identical_batches", "input[0]", 4, message]]
    assert inputs["two alike"] == [
        ["identical_batches", "input[0]", 4, message.replace("all 4 ranks", "ranks 0, 1")]
    ]
    pairs = [message.replace("all 4", "all 2")] * 2  # those along dp, for each place along tp
    assert [alert[3] for alert in inputs["sharded"]] == pairs
    assert inputs["fixed"] == inputs["one batch"] == inputs["sharded fixed"] == []


def test_a_pipeline_stage_gets_what_the_one_before_it_returns(inputs):
    ((rule, name, step, message),) = inputs["pipeline"]
    assert (rule, name, step) == ("replicas", "stage 2 input[0]", 6)
    assert message.startswith(
        "stage 2 input[0] differs between rank 1 and rank 2 since step 6, without a majority; "
        "1 of 16 elements differs: "
    )
    assert message.endswith("element [0, 3]")
