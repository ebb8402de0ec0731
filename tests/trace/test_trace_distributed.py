"""Tracing over several ranks: real processes over gloo."""

from __future__ import annotations

import h5py
import pytest

import tensortap as tap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # two processes

MODEL = """
import hashlib
N, G, B, C = 8, 4, 3, 5

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(C, C)
        self.drop = nn.Dropout(0.1)
    def forward(self, x, odd=False):
        h = self.drop(self.fc(x))
        if odd:
            seldom = h.relu()
        return h

def batches(count, size=B):
    made = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(size, C, generator=made) for _ in range(count)]

def make():
    torch.manual_seed(0)
    model = Model()
    return model, nn.parallel.DistributedDataParallel(model)

def train(model, data, odd=lambda i: False):
    # by hand: an optimizer imports the compiler, which takes longer than all the rest
    for i, x in enumerate(data):
        model.zero_grad()
        model(x, odd(i)).square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad

def weights(model):
    found = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(found).hexdigest()

def shown(part):
    return [list(v.shape) if isinstance(v, torch.Tensor) else v for v in part.values]

def everybody(count, size=B):
    '''The batches of all ranks, for rank 0 to look at: ranks, iterations, batch, features.'''
    mine = torch.stack(batches(count, size))
    if rank == 0:
        found = [torch.empty_like(mine) for _ in range(world)]
        dist.gather(mine, found)
        return torch.stack(found)
    dist.gather(mine)

stack = tap.rooms.trace.stack_padded_tensors
result = {}
"""

EXAMPLES = """
expected = everybody(N)

# 1: stacked before the gathering, after it, and at the end
model, ddp = make()
with tap.trace(
    model, ["forward", "forward.x"], gathering_interval=G,
    pre_gather_callbacks=[stack], post_gather_callbacks=[stack], post_trace_callbacks=[stack],
) as tracer:
    train(ddp, batches(N))
if rank == 0:
    part = tracer.results["forward.x"]
    result["stacked"] = [shown(part), shown(tracer.results["forward"])]
    # gatherings, ranks, iterations, batch, features
    wanted = expected.unflatten(1, (N // G, G)).transpose(0, 1)
    result["stacked values"] = torch.equal(part.values[0], wanted)
    result["stacked iterations"] = part.iterations
    result["stacked ranks"] = part.ranks
else:
    result["elsewhere"] = {k: p.values for k, p in tracer.results.items()}
result["weights"] = weights(model)

# 2: to HDF5 as they come
model, ddp = make()
saver = tap.HDF5("trace.h5", compression="gzip")
with tap.trace(
    ddp, ["forward", "forward.x"], gathering_interval=2, post_gather_callbacks=[stack, saver]
) as tracer:
    train(ddp, batches(N))
result["files"] = sorted(p for p in os.listdir(".") if p.endswith("h5"))
if rank == 0:
    result["hdf5"] = list(saver.datasets["forward.x"].shape)
    result["hdf5 left"] = tracer.results["forward.x"].values
    import h5py
    with h5py.File("trace.h5") as file:
        stored = {name: data[:] for name, data in file["forward.x"].items()}
    result["hdf5 iterations"] = stored["iterations"].tolist()
    result["hdf5 ranks"] = stored["ranks"].tolist()
    wanted = expected.unflatten(1, (N // 2, 2)).transpose(0, 1).flatten(1, 2)
    result["hdf5 values"] = torch.equal(torch.from_numpy(stored["values"]), wanted)

# a tail, an interval that is kept, shapes of each rank's own
model, ddp = make()
moments = []
with tap.trace(
    model, "forward.x", gathering_interval=4,
    post_gather_callbacks=[lambda name, values, iterations, ranks: moments.append(len(values))],
) as tracer:
    train(ddp, batches(10, rank + 1))
if rank == 0:
    part = tracer.results["forward.x"]
    result["tail"] = sorted(zip(part.iterations, part.ranks))
    result["moments"] = moments
    result["shapes"] = sorted({(r, *v.shape) for v, r in zip(part.values, part.ranks)})

# only the last rank ever binds it, and at the end of the training only
import logging
logged = []
class Log(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger("tensortap").addHandler(Log())
model, ddp = make()
with tap.trace(model, "forward.seldom", gathering_interval=2) as tracer:
    train(ddp, batches(5), lambda i: rank == world - 1 and i >= 3)
part = tracer.results["forward.seldom"]
result["seldom"] = [part.iterations, part.ranks]

result["messages"] = [text for text in logged if "seldom" in text]

# nothing traced
model, ddp = make()
train(ddp, batches(N))
result["untraced weights"] = weights(model)
result["errors"] = tap.receipt().reasons["error"]
"""


@pytest.fixture(scope="module")
def found(gloo):
    return gloo(MODEL + EXAMPLES, 2)


N, G, B, C = 8, 4, 3, 5


def test_stacks_of_all_callbacks(found):
    world, first = len(found), found[0]
    assert first["stacked"] == [[[N // G, world, G, B, C]]] * 2
    assert first["stacked values"]
    assert first["stacked iterations"] == [
        [[list(range(g * G, g * G + G)) for _ in range(world)] for g in range(N // G)]
    ]
    assert first["stacked ranks"] == [[[[r] * G for r in range(world)] for _ in range(N // G)]]
    assert all(set(map(str, one["elsewhere"].values())) == {"[]"} for one in found[1:])


def test_values_in_hdf5(found):
    world, first = len(found), found[0]
    assert first["hdf5"] == [N // 2, 2 * world, B, C]
    assert first["hdf5 values"]
    assert first["hdf5 left"] == []
    assert first["hdf5 iterations"] == [[2 * g, 2 * g + 1] * world for g in range(N // 2)]
    assert first["hdf5 ranks"] == [[r for r in range(world) for _ in "ab"]] * (N // 2)
    assert all(one["files"] == ["trace.h5"] for one in found[:1])


def test_gathers_at_the_interval_and_at_the_end(found):
    world = len(found)
    assert found[0]["tail"] == [[i, r] for i in range(10) for r in range(world)]
    assert found[0]["moments"] == [4 * world, 4 * world, 2 * world]
    assert found[0]["shapes"] == [[r, r + 1, C] for r in range(world)]


def test_ranks_without_values_take_part(found):
    world = len(found)
    assert found[0]["seldom"] == [[3, 4], [world - 1] * 2]
    assert all(one["seldom"] == [[], []] for one in found[1:])
    assert found[0]["messages"] == []  # another rank has a value


def test_training_is_bit_identical(found):
    assert {one["weights"] for one in found} == {found[0]["untraced weights"]}
    assert {one["untraced weights"] for one in found} == {found[0]["untraced weights"]}
    assert [one["errors"] for one in found] == [0] * len(found)


APART = """
tap.init("runs")
model, ddp = make()
with tap.trace(
    model, ["forward.x"], post_trace_callbacks=[tap.HDF5("apart.h5")]
) as tracer:
    if rank == 1:  # nobody waits for anybody
        for x in batches(7):
            model(x)
result["own"] = tracer.results["forward.x"].values
tap.finish()
dist.barrier()
result["files"] = sorted(p for p in os.listdir(".") if p.startswith("apart"))

# a rank whose training fails, and lives on: the others are told at once
model, ddp = make()
try:
    with tap.trace(model, ["forward.x"], gathering_interval=2) as tracer:
        for i, x in enumerate(batches(6)):
            if rank == 1 and i == 3:
                raise KeyError("mine")
            model(x)
except KeyError as error:
    result["raised"] = str(error)
part = tracer.results["forward.x"]
result["kept"] = sorted(zip(part.ranks, part.iterations))
result["errors"] = tap.receipt().reasons["error"]
dist.barrier()

# a rank that is stuck: it is waited for as long as the group says
import datetime, pathlib, time
short = dist.new_group(timeout=datetime.timedelta(seconds=3))
model, ddp = make()
with tap.trace(model, ["forward.x"], gathering_interval=1, group=short) as tracer:
    for i, x in enumerate(batches(4)):
        while rank == 1 and i == 2 and not pathlib.Path("done").exists():
            time.sleep(0.01)
        model(x)
if rank == 0:
    pathlib.Path("done").touch()
part = tracer.results["forward.x"]
result["late"] = sorted(zip(part.ranks, part.iterations))
result["late errors"] = tap.receipt().reasons["error"] - result["errors"]
"""


def test_ranks_that_do_not_gather_or_fail_keep_their_own_values(gloo):
    found = gloo(MODEL + APART, 2)
    assert [one["own"] for one in found] == [[], []]  # in the files
    assert found[0]["files"] == ["apart_rank1.h5"]
    with h5py.File(gloo.folder / "apart_rank1.h5") as file:
        stored = {name: data[:] for name, data in file["forward.x"].items()}
    assert stored["iterations"].tolist() == list(range(7))
    assert stored["ranks"].tolist() == [1] * 7
    (path,) = (gloo.folder / "runs").iterdir()
    run = tap.open(path)
    records = list(run.reader.records("forward.x"))
    assert [(r.rank, r.kind.value) for r in records] == [(1, "Local")] * 7
    assert (run.get("forward.x", step=records[3].step).numpy() == stored["values"][3]).all()
    # one rank fails: the values gathered before are kept, and the others continue alone
    assert found[1]["raised"] == "'mine'"
    assert found[1]["kept"] == [[1, 2]]
    assert found[0]["kept"] == [[0, i] for i in range(6)] + [[1, 0], [1, 1]]
    assert found[0]["errors"] == 1
    assert "rank 1 disconnected" in gloo.errors[0]
    # one rank hangs: it keeps the values that nobody receives
    assert found[0]["late"] == [[0, i] for i in range(4)] + [[1, 0]]
    assert found[1]["late"] == [[1, i] for i in range(1, 4)]
    assert [one["late errors"] for one in found] == [1, 1]
