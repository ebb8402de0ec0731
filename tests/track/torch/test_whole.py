"""Statistics of whole tensors: those of several ranks, merged, are those of one process."""

import numpy as np
import pytest

import tensortap as tap
from tensortap.runs.rows import STATISTICS
from tensortap.table.columns import exponents
from tests.track.torch.layouts import MODEL, RANKS

pytestmark = pytest.mark.slow

_WORLDS = {
    2: "ddp fsdp tp sp pp ep tp-bug pp-bug",
    4: "fsdp hsdp tp_fsdp pp fsdp-bug tp_fsdp-bug tp_fsdp-digests",
}
_KINDS = ("Activation", "Gradient", "Weight", "Weight_Gradient", "Optimiser_State")
_MOMENTS = ("mean", "std", "mean_abs", "rm2", "rm4", "rm8")


@pytest.fixture(scope="module")
def layouts(gloo, tmp_path_factory):
    """Return a function that gives the runs of all layouts with a number of ranks."""
    found = {}

    def runs(world):
        if world not in found:
            folder = tmp_path_factory.mktemp(f"whole{world}")
            gloo(RANKS, world=world, RUNS=f"{folder}/", LAYOUTS=_WORLDS[world])
            found[world] = {path.name: tap.open(next(path.iterdir())) for path in folder.iterdir()}
        return found[world]

    return runs


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return a function that gives the run of one process with the same global batch."""
    space, found = {}, {}
    exec(MODEL, space)

    def run(scale=1.0, parts=1, moe=False, **options):
        key = scale, parts, moe, *options
        if key not in found:
            folder = tmp_path_factory.mktemp("one")
            look = lambda net: space["backward"](net, space["batch"](), scale, parts)
            space["train"](space["model"](moe), folder, look, **options)
            tap.finish()
            found[key] = tap.open(next(folder.iterdir()))
        return found[key]

    return run


def reference(one_process, layout, world, **options):
    """Return the run of one process that a layout must agree with."""
    name = layout.partition("-")[0]
    # over how many parts of the batch the gradients of weights are averaged
    averaged = {"tp": 1, "sp": 1, "pp": 1, "tp_fsdp": max(world // 2, 1)}.get(name, world)
    return one_process(1 / averaged, **_model(name), **options)


def _model(layout):
    """Return the model of a layout: one with experts, or in two parts of a batch."""
    return {"parts": 2 if layout == "pp" else 1, "moe": layout == "ep"}


def described(run):
    """Return the statistics and exponents of every whole tensor, by kind, name, step and call.

    Partial sums are no whole tensors.
    """
    table = run.table().whole()
    tags = table.take(np.arange(len(table)), ["tags"]).column("tags").to_pylist()
    bins = exponents(table, np.arange(len(table)))
    found = {}
    for row in range(len(table)):
        kind = table.kinds[table.kind[row]]
        if kind in _KINDS and not dict(tags[row] or ()).get("placements", "").startswith("P"):
            key = kind, table.names[table.name[row]], int(table.step[row]), int(table.call[row])
            assert key not in found, f"{key} is not merged"
            counts = {bins.low + i: n for i, n in enumerate(bins.counts[:, row].tolist()) if n}
            found[key] = {name: table.column(name)[row] for name in STATISTICS}, counts
    return found


def cases():
    return [
        (layout, world)
        for world, names in _WORLDS.items()
        for layout in names.split()
        if "-" not in layout
    ]


@pytest.mark.parametrize(("layout", "world"), cases())
def test_whole_tensors_are_those_of_one_process(layouts, one_process, layout, world):
    found = described(layouts(world)[f"{layout}-{world}"])
    wanted = described(reference(one_process, layout, world))
    # the gradient of an output is of the loss of one rank, which is not averaged
    whole_loss = described(one_process(1.0, **_model(layout)))
    names = {key for key in wanted if not (layout == "pp" and key[1] == "net.Net")}
    if layout == "sp":  # the gradients of replicated parameters are partial sums
        names = {key for key in names if key[0] != "Weight_Gradient" or "_proj." in key[1]}
    assert {key for key in found if key[1] != "net.GraphModule"} == names
    assert len(names) > 40
    for key in sorted(names):
        expected = wanted[key]
        if key[0] == "Gradient":
            if key[2]:
                continue  # the weights of that run differ by then
            expected = whole_loss[key]
        assert found[key][1] == expected[1], key
        for name, value in expected[0].items():
            rtol = 1e-12 if name in _MOMENTS else 0
            # values that cancel each other have a mean of rounding errors
            atol = 1e-15 * expected[0]["max_abs"] if name == "mean" else 0
            np.testing.assert_allclose(
                found[key][0][name], value, rtol=rtol, atol=atol, err_msg=str(key)
            )


@pytest.mark.parametrize(("layout", "world"), cases())
def test_correct_layouts_agree_with_one_process(layouts, one_process, layout, world):
    run = layouts(world)[f"{layout}-{world}"]
    kinds = [kind for kind in _KINDS if kind != "Gradient"]
    report = tap.compare(
        run, reference(one_process, layout, world), kinds=kinds, mapping=["GraphModule=Net"]
    )
    assert report, str(report)
    partial = {"net.norm.shift", "net.out.weight", "net.out.bias"} if layout == "sp" else set()
    assert {key.name for key in report.unplaced} == partial
    assert tap.compare(run, run)


def test_partial_sums_stay_apart_and_are_marked(layouts):
    run = layouts(2)["sp-2"]
    rows = run.stats().query("kind == 'Weight_Gradient' and name == 'net.norm.shift' and step == 0")
    assert rows["rank"].tolist() == [0, 1]
    assert rows["placements"].tolist() == ["P(sum)", "P(sum)"]
    assert len(run.stats(rank=1).query("name == 'net.norm' and step == 0")) == 2
    assert len(run.stats(rank="all").query("name == 'net.norm' and step == 0")) == 4


@pytest.mark.parametrize(("layout", "world"), [("tp", 2), ("fsdp", 4), ("tp_fsdp", 4), ("pp", 2)])
def test_a_wrong_weight_is_named_with_its_rank(layouts, one_process, layout, world):
    run = layouts(world)[f"{layout}-bug-{world}"]
    report = tap.compare(
        run, reference(one_process, layout, world), mapping=["GraphModule=Net"],
        kinds=[kind for kind in _KINDS if kind != "Gradient"],
    )  # fmt: skip
    assert (report.first.key.name, report.first.key.step) == ("net.o_proj.weight", -1)
    assert report.ranks == (1,), str(report)
    assert "o_proj.weight (Weight) differs before any output does" in report.culprit
    assert "on rank 1, by net.o_proj.weight" in report.culprit


def test_digests_compare_across_layouts(layouts, one_process):
    run = layouts(4)["tp_fsdp-digests-4"]
    options = {"tensors": False, "digests": True}
    exact = {"atol": 0, "rtol": 0, "kinds": ["Weight", "Weight_Gradient", "Optimiser_State"]}
    report = tap.compare(run, reference(one_process, "tp_fsdp", 4, **options), **exact)
    assert report, str(report)
    assert report.compared > 40
    assert not report.by_statistics
    other = one_process(1.0, **options)  # trained by another loss
    assert not tap.compare(run, other, **exact)


def test_the_mesh_is_recorded(layouts):
    records = layouts(4)["tp_fsdp-4"].records("net.o_proj.weight")
    found = {record.rank: record.tags["mesh"] for record in records}
    assert found == {rank: f"dp={rank // 2}/2 tp={rank % 2}/2" for rank in range(4)}


def test_outputs_of_a_tensor_parallel_model_have_their_placement(layouts):
    records = layouts(2)["tp-2"].records()
    found = {r.name: r.tags["placements"] for r in records if r.kind.value == "Activation"}
    assert found == {
        "net.norm": "?", "net.q_proj": "S(2)", "net.act": "S(2)", "net.o_proj": "R",
        "net.out": "?", "net.Net": "?",
    }  # fmt: skip
