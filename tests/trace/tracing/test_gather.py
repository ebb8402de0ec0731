"""Gathering over torch.distributed: real processes, over gloo."""

from __future__ import annotations

import json

import pytest

from tensortap.core.errors import TensortapError
from tensortap.rooms.trace.gather import Gatherer
from tensortap.rooms.trace.results import TracedValues
from tensortap.rooms.trace.torch import GlooChannel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # three processes

PROGRAM = """
import collections, dataclasses, numpy as np
from tensortap.core.errors import TensortapError
from tensortap.rooms.trace.gather import Gatherer
from tensortap.rooms.trace.results import TracedValues

Pair = collections.namedtuple("Pair", "a b")

@dataclasses.dataclass
class Both:
    x: torch.Tensor
    n: int

class Thing:
    def __repr__(self):
        return "a thing"

complex_of = torch.view_as_complex

def values_of(rank):
    made = torch.Generator().manual_seed(rank)
    def normal(*shape):
        return torch.randn(*shape, generator=made)
    return {
        "float32": [normal(rank + 2, 3), normal(1, 40, rank + 1)],
        "bfloat16": [normal(7).bfloat16(), normal(100, 200).bfloat16()],
        "float8": [normal(5).to(torch.float8_e4m3fn), normal(200, 200).to(torch.float8_e5m2)],
        "bool": [normal(6) > 0, normal(20_000) > 0],
        "complex": [complex_of(normal(4, 2)), complex_of(normal(9000, 2)).conj()],
        "0-dim": [normal(()), normal(()).double()],
        "empty": [torch.zeros(0, 3), torch.zeros(2, 0).int()],
        "strided": [normal(4, 5).T, normal(300, 200).T, normal(300, 300)[::3, 1::2]],
        "requires grad": [normal(9).requires_grad_(), normal(90, 90).requires_grad_() * 2],
        "parameter": [nn.Parameter(normal(80, 80))],
        "numpy": [normal(3).numpy(), np.float16(rank), normal(90, 90).numpy().astype(">f8")],
        "plain": [rank, rank / 3, True, None, "text é", b"bytes", 1 + 2j, 2**80, float("nan")],
        "nested": [{"a": [normal(3), (1, normal(99, 99))], 2: {"x"}}, Pair(normal(2), rank)],
        "dataclass": [Both(normal(100, 100), rank)],
        f"only {rank}": [normal(2)],
    }

def parts_of(rank):
    return {
        name: TracedValues(list(v), [10 * rank + i for i in range(len(v))], [rank] * len(v))
        for name, v in values_of(rank).items()
    }

def same(a, b):
    if type(a).__name__ != type(b).__name__ and not isinstance(a, nn.Parameter):
        return False
    if isinstance(a, torch.Tensor):
        bits = [t.detach().resolve_conj().contiguous().reshape(-1) for t in (a, b)]
        bits = [t.view(torch.uint8) for t in bits]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    return a == b or (a != a and b != b)

faults = []
def report(name, error):
    faults.append(str(error))

def gather(parts, group=None):
    gatherer = Gatherer(group, report)
    try:
        return gatherer.gather(parts, last=True)
    finally:
        gatherer.close()

result = {}

# all kinds of values; the last rank has none; the random state is unchanged
torch.manual_seed(3)
before = torch.get_rng_state()
mine = parts_of(rank) if rank < world - 1 else {}
found = gather(mine)
result["random state untouched"] = torch.equal(before, torch.get_rng_state())
if rank == 0:
    wrong = []
    expected = collections.defaultdict(list)
    for r in range(world - 1):
        for name, part in parts_of(r).items():
            expected[name] += zip(part.values, part.iterations, part.ranks)
    for name, wanted in expected.items():
        part = found[name]
        rows = list(zip(part.values, part.iterations, part.ranks, strict=True))
        if len(rows) != len(wanted) or not all(map(same, wanted, rows)):
            wrong.append(name)
    result["wrong"] = wrong
    result["names"] = sorted(found) == sorted(expected)
    result["graph free"] = not any(v.requires_grad for v in found["requires grad"].values[2:])
else:
    result["nothing here"] = found is None

# objects and sparse tensors
odd = {"odd": TracedValues([Thing(), torch.eye(2).to_sparse()], [0, 1], [rank] * 2)}
found = gather(odd)
if rank == 0:
    result["odd"] = [[type(v).__name__, getattr(v, "repr", "")[:7]] for v in found["odd"].values]

# ranks that gather different numbers of times, rank 0 the least
def one(i):
    return {"x": TracedValues([torch.full((5000,), float(rank))], [i], [rank])}
gatherer = Gatherer(None, report)
gatherer.connect()
seen = []
for i in range(2 * rank):
    seen.append(gatherer.gather(one(i)))
seen.append(gatherer.gather(one(99), last=True))
gatherer.close()
if rank == 0:
    part = seen[0]["x"]
    result["uneven"] = sorted(zip(part.ranks, part.iterations))
    result["uneven values"] = all((v == r).all() for v, r in zip(part.values, part.ranks))

# and rank 0 the most
gatherer = Gatherer(None, report)
seen = []
for i in range(4 - rank):
    seen.append(gatherer.gather(one(i)))
seen.append(gatherer.gather(one(99), last=True))
gatherer.close()
if rank == 0:
    result["fewer"] = [sorted(zip(f["x"].ranks, f["x"].iterations)) for f in seen]

# meanwhile a reduction of the user is running
tensor = torch.full((100_000,), float(rank))
work = dist.all_reduce(tensor, async_op=True)
found = gather(one(0))
work.wait()
result["reduced"] = tensor[0].item() == sum(range(world))

# a group of some ranks
some = dist.new_group([1, 2])
found = gather(one(0), some)
result["some"] = None if found is None else found["x"].ranks
result["faults"] = faults
"""


@pytest.fixture(scope="module")
def found(gloo):
    return gloo(PROGRAM, 3)


def test_values_of_all_kinds_arrive_unchanged(found):
    first = found[0]
    assert first["wrong"] == []
    assert first["names"]
    assert first["graph free"]
    assert [other["nothing here"] for other in found[1:]] == [True, True]
    assert all(one["random state untouched"] for one in found)


def test_objects_are_sent_as_type_and_repr(found):
    own, others = found[0]["odd"][:2], found[0]["odd"][2:]
    assert own == [["Thing", ""], ["Tensor", ""]]
    assert others == [["Opaque", "a thing"], ["Opaque", "tensor("]] * 2


def test_ranks_may_gather_different_numbers_of_times(found):
    rows = [[0, 99], *[[1, i] for i in (0, 1, 99)], *[[2, i] for i in (0, 1, 2, 3, 99)]]
    assert found[0]["uneven"] == rows
    assert found[0]["uneven values"]
    assert found[0]["fewer"] == [
        [[0, 0], [1, 0], [2, 0]],
        [[0, 1], [1, 1], [2, 1]],
        [[0, 2], [1, 2], [2, 99]],
        [[0, 3], [1, 99]],
        [[0, 99]],
    ]
    assert [one["faults"] for one in found] == [[], [], []]


def test_collectives_of_the_user_are_unaffected(found):
    assert all(one["reduced"] for one in found)


def test_group_of_some_ranks(found):
    assert [one["some"] for one in found] == [[0], [1, 2], None]


DYING = """
import time
from tensortap.rooms.trace.gather import Gatherer
from tensortap.rooms.trace.results import TracedValues
faults = []
gatherer = Gatherer(None, lambda name, error: faults.append(str(error)))
gatherer.connect()
dying = int(os.environ["DYING"])
seen = []
for i in range(3):
    if rank == dying and i == 1:
        os._exit(0)
    part = {"x": TracedValues([torch.ones(10_000)], [i], [rank])}
    try:
        found = gatherer.gather(part, last=i == 2)
    except Exception as error:
        faults.append(type(error).__name__)
        found = part
    seen.append(None if found is None else found["x"].ranks)
print(json.dumps([seen, faults]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("dying", "world"), [(2, 3), (0, 2)])
def test_rank_that_dies_is_not_awaited(gloo, dying, world):
    done = gloo.printed(DYING, world, DYING=str(dying))
    found = [json.loads(out.splitlines()[-1]) if out else None for out in done]
    assert found[dying] is None, done
    if dying:
        seen, faults = found[0]
        assert seen == [[0, 1, 2], [0, 1], [0, 1]]
        assert len(faults) == 1
        assert faults[0].startswith(
            "rank 2 disconnected: its traced values are no longer gathered:"
        )
        assert found[1] == [[None, None, None], []]
    else:  # the others keep their own values
        seen, faults = found[1]
        assert seen == [None, [1], [1]], done
        assert len(faults) == 1


class Work:
    def wait(self):
        return True


class Line:
    """Stands in for gloo, in one process."""

    def __init__(self, messages):
        self.messages = messages

    def send(self, tensors, to, tag):
        assert (to, tag) == (0, 0)
        self.messages.append(tensors[0].clone())
        return Work()

    def recv(self, tensors, rank, tag):
        assert (rank, tag) == (1, 0)
        tensors[0].copy_(self.messages.pop(0))
        return Work()


def test_invalid_message_disconnects_the_rank():
    messages = []
    ends = [GlooChannel(Line(messages), [0, 1], rank) for rank in range(2)]
    ends[1].send((3).to_bytes(8))
    ends[1].send(b"abc")
    faults = []
    gatherer = Gatherer(None, lambda name, error: faults.append(error))
    gatherer._channel, gatherer._others = ends[0], [1]
    assert gatherer.gather({"x": TracedValues([1], [0], [0])})["x"].values == [1]
    assert isinstance(faults[0], TensortapError)
    assert gatherer.gather({}) == {}  # no rank is awaited
