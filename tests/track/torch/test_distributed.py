"""Models that are spread over several processes, with gloo."""

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
def rows(tracker):
    return [
        dict(
            name=r.name, kind=r.kind.value, shape=r.shape, mean=r.stats.mean,
            errors=tap.receipt().reasons["error"],
            shard=r.shard and [r.shard.global_shape, r.shard.offsets],
        )
        for r in tracker.records if r.stats
    ]

def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, Replicate, distribute_tensor
    mesh = init_device_mesh("cpu", (2,))
    class Spread(nn.Module):
        def forward(self, x):
            return x * 2
    model = nn.Sequential(Spread())
    x = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)]).requires_grad_()
    with tap.track(model) as tracker:
        model(x).sum().backward()
        tracker.step()
    return rows(tracker)

def watch():
    import threading
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    result = {}
    for which in (0, "all"):
        path = f"{os.environ['FILMS']}-{which}-{rank}"
        def film(record):
            with open(path, "a") as file:
                file.write(f"{record.name} {record.rank}\\n")
        with tap.watch(model, film, rate=None, start_method="fork", rank=which) as watcher:
            model(torch.randn(2, 4)).sum().backward()
            worker = watcher.pid
        films = sorted(open(path).read().split("\\n")[:-1]) if os.path.exists(path) else []
        result[str(which)] = [worker is not None, films]
    return result

result = {each.__name__: each() for each in (dtensor, watch)}
"""


@pytest.fixture(scope="module")
def found(gloo, tmp_path_factory):
    """What two ranks have found; they run all programs one after the other."""
    return gloo(_PROGRAM, FILMS=str(tmp_path_factory.mktemp("films") / "film"))


def test_outputs_that_are_dtensors(found):
    found = [results["dtensor"] for results in found]
    for rank, rows in enumerate(found):
        outputs = [r for r in rows if r["name"] == "0"]
        assert [r["kind"] for r in outputs] == ["Activation", "Gradient"]
        assert {r["errors"] for r in rows} == {0}
        assert outputs[0]["shape"] == [[3, 2], [2, 2]][rank]
        assert outputs[0]["shard"] == [[5, 2], [3 * rank, 0]]
        assert outputs[0]["mean"] == [5.0, 15.0][rank]


def test_watches_one_rank_or_all(found):
    found = [results["watch"] for results in found]
    one = ["0 0", "1 0", "Sequential 0"]
    assert [r["0"] for r in found] == [[True, one], [False, []]]
    assert [r["all"] for r in found] == [[True, one], [True, ["0 1", "1 1", "Sequential 1"]]]
