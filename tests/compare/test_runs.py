"""Match the records of two runs, and find what is missing and what differs first."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tap
from tensortap.core.errors import TensortapError
from tensortap.rooms.compare.html import render
from tensortap.rooms.compare.matching import parse_mapping
from tensortap.rooms.compare.runs import compare_runs
from tests.compare.test_report import shown as shown_text

RNG = np.random.default_rng(0)
ARRAYS = {name: RNG.standard_normal(5000).astype("f4") for name in ("a", "b", "c")}


def training(change=lambda name, step, x: x, steps=3, names="abc", kind="Activation", rank=0):
    return [
        (name, kind, step, change(name, step, ARRAYS[name] * (step + 1)), rank)
        for step in range(steps)
        for name in names
    ]


def test_runs_that_agree(write):
    one, two = write(training()), write(training())
    report = compare_runs(one, two)
    assert report
    assert (report.compared, report.equal, report.first, report.missing) == (9, 9, None, ())
    assert "9 records compared" in str(report)
    assert tap.compare(one, two)
    assert tap.compare(tap.open(one), str(two))


def test_first_difference_follows_the_order_of_execution(write):
    def change(name, step, x):
        return x * 1.5 if (name, step) in {("c", 1), ("b", 1), ("a", 2)} else x

    report = compare_runs(write(training()), write(training(change)))
    assert not report
    assert [(d.key.step, d.key.name) for d in report.differences] == [(1, "b"), (1, "c"), (2, "a")]
    assert report.first.key.name == "b"
    assert "culprit: b: everything before it agrees" in report.culprit
    assert "b is 1.5 times a" in str(report.first) or "times" in str(report.first)
    assert report.equal == 6


def test_missing_records_fail(write):
    one, two = write(training()), write([*training(steps=2), ("d", "Value", 0, 1.0)])
    report = compare_runs(one, two)
    assert not report
    assert not report.differences
    only_a = [(m.key.name, m.key.step) for m in report.missing if m.side == "a"]
    assert only_a == [("a", 2), ("b", 2), ("c", 2)]
    assert [m.key.name for m in report.missing if m.side == "b"] == ["d"]
    assert "3 only in the first, 1 only in the second" in str(report)
    assert compare_runs(one, two, allow_missing=True)


def test_alerts_are_not_compared(write):
    looked_out = [*training(), ("b", "Alert", 1, {"rule": "nan", "message": "1 NaN of 3"})]
    one, two = write(training()), write(looked_out)
    assert compare_runs(one, two)
    assert compare_runs(one, two, names="b")
    asked = compare_runs(one, two, kinds=["Alert", "Activation"])
    assert [m.key.kind for m in asked.missing] == ["Alert"]


def test_selection(write):
    bad = write(training(lambda n, s, x: x + 1 if (n, s) == ("b", 1) else x))
    good = write(training())
    assert not compare_runs(good, bad)
    assert compare_runs(good, bad, names="^[ac]$")
    assert compare_runs(good, bad, steps=(2, None))
    assert compare_runs(good, bad, steps=(None, 0))
    assert compare_runs(good, bad, kinds=["Gradient"]).compared == 0
    assert not compare_runs(good, bad, kinds=["Activation"], steps=(1, 1), ranks=[0])
    assert compare_runs(good, bad, ranks=[3]).compared == 0
    with pytest.raises(TensortapError, match="regular expression"):
        compare_runs(good, bad, names="(")


def test_mapping(write):
    old = write([(f"old.{n}", k, s, v, r) for n, k, s, v, r in training()])
    new = write([(f"new.{n}.x", k, s, v, r) for n, k, s, v, r in training()])
    assert not compare_runs(old, new)
    assert compare_runs(old, new, mapping=[parse_mapping(r"old\.(.*)=new.\1.x")])
    with pytest.raises(TensortapError, match=r"gives both 'old\.a' and 'old\.b' the name 'x'"):
        compare_runs(old, new, mapping=[(r"old\..*", "x")])


def test_ranks(write):
    def change(name, step, x):
        return x + 1 if (name, step) == ("b", 1) else x

    one = write(training(rank=0) + training(rank=1))
    two = write(training(rank=0) + training(change, rank=1))
    first = compare_runs(one, two).first
    assert (first.key.name, first.key.step, first.key.rank) == ("b", 1, 1)


def test_statistics_only(write):
    stats = [(n, k, s, tap.viz.summarize(v), r) for n, k, s, v, r in training()]
    one, two = write(stats), write(stats)
    report = compare_runs(one, two)
    assert report
    assert report.equal == 9
    off = [(n, k, s, tap.viz.summarize(v * 2), r) for n, k, s, v, r in training()]
    report = compare_runs(one, write(off))
    assert not report
    assert report.first.by == "statistics"
    assert report.by_statistics == 9
    assert "statistics differ: min" in str(report.first)
    report = compare_runs(one, write(training()))  # statistics against values
    assert report
    assert report.by_statistics == 9


def test_nan(write):
    def hole(name, step, x):
        x = x.copy()
        x[7] = np.nan
        return x

    one, two = write(training(hole)), write(training(hole))
    assert compare_runs(one, two)
    assert not compare_runs(one, two, equal_nan=False)


@pytest.mark.slow
def test_dumps(tmp_path):
    import torch

    paths = []
    for factor in (1, 1, 2):
        paths.append(tap.init(tmp_path))
        tap.dump(torch.ones(3) * factor, "x")
        tap.finish()
    assert compare_runs(paths[0], paths[1])
    assert not compare_runs(paths[0], paths[2])


@pytest.mark.slow
def test_provenance(tmp_path):
    paths = []
    for value in ("1", "2"):
        import os

        os.environ["MY_SETTING"] = value
        paths.append(tap.init(tmp_path))
        tap.catch(1.0, "x")
        tap.finish()
    del os.environ["MY_SETTING"]
    found = compare_runs(*paths).provenance
    assert found["environment"] == ({"MY_SETTING": "1"}, {"MY_SETTING": "2"})
    assert "packages" not in found


def test_first_bitwise_difference(write):
    def drift(name, step, x):  # bits differ from "b" on; only "c" is beyond the tolerance
        return x * np.float32(1 + {"a": 0, "b": 1e-6, "c": 1e-4}[name]) if step else x

    one, two = write(training(drift)), write(training())
    report = compare_runs(one, two)
    assert (report.first.key.name, report.first.key.step) == ("c", 1)
    bitwise = report.first_bitwise
    assert (bitwise.key.name, bitwise.key.step) == ("b", 1)
    assert bitwise.comparison.equal
    assert "b" in report.culprit
    assert (report.atol, report.rtol) == (1e-8, 1e-5)
    json = report.to_json()
    assert json["first_bitwise"]["name"] == "b"
    for text in (str(report), shown_text(report, 200), render(report)):
        assert "first bitwise difference: b " in text or "bitwise  b " in text
    agreeing = compare_runs(one, two, atol=1.0)
    assert agreeing
    assert agreeing.first_bitwise.key == bitwise.key
    assert compare_runs(two, two).first_bitwise is None
