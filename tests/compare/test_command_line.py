"""The command `tensortap compare`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.commands import type_in

ROOT = Path(__file__).parents[2]


def compare_for_real(*arguments):
    """In a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tensortap", "compare", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def compare(*arguments, code=0, real=False):
    typed = compare_for_real(*arguments) if real else type_in("compare", *arguments)
    ended, out, said = typed
    assert ended == code, said + out
    assert "Traceback" not in said
    return out, said


def one_line(*arguments):
    """What is said about misuse: one line, and nothing to be read as data."""
    out, said = compare(*arguments, code=2)
    assert not out
    assert said.startswith("tensortap: ")
    assert said.count("\n") == 1
    return said


def layers(change=lambda name, step, x: x, prefix=""):
    rng = np.random.default_rng(0)
    found = []
    for rank in (0, 1):
        for step in range(5):
            for name, kind in (("attn", "Activation"), ("mlp", "Activation"), ("w", "Weight")):
                x = rng.standard_normal((6, 8)).astype("f4")
                found.append((prefix + name, kind, step, change(name, step, x), rank))
    return found


@pytest.fixture
def runs(write):
    def late(name, step, x):
        return x + np.float32(1e-3) if name == "mlp" and step >= 3 else x

    return write(layers(late)), write(layers())


@pytest.mark.slow
def test_exit_code_of_equal_and_differing_runs(runs, tmp_path):
    out, _ = compare(runs[1], runs[1])
    assert out.startswith("✓ agree")
    out, said = compare(*runs, code=1, real=True)
    assert out.startswith("✗ differ")
    assert "mlp  Activation  step 3  rank 0" in out
    assert "\x1b" not in out
    assert not said  # the bar is for terminals


def test_json(runs):
    out, _ = compare(*runs, "--json", code=1)
    found = json.loads(out)
    assert found["first"]["name"] == "mlp"
    assert [(d["step"], d["rank"]) for d in found["differences"]] == [
        (3, 0), (3, 1), (4, 0), (4, 1),
    ]  # fmt: skip


@pytest.mark.slow
def test_tolerance_and_selection_options(runs, write, tmp_path):
    compare(*runs, "--atol", "1e-2")
    compare(*runs, "--steps", ":2")
    compare(*runs, "--steps", "1")
    compare(*runs, "--names", "attn|w")
    compare(*runs, "--kinds", "weight,Gradient")
    out, _ = compare(*runs, "--steps", "4:", "--ranks", "1", "--json", code=1)
    (only,) = json.loads(out)["differences"]
    assert (only["step"], only["rank"]) == (4, 1)
    out, _ = compare(*runs, "--rows", 1, code=1)
    assert "… and 3 more" in out
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nnames = "mlp"\nignore = true\n')
    out, _ = compare(*runs, "--rules", rules)
    assert "4 ignored" in out
    old = write(layers(prefix="old."))
    compare(old, runs[1], code=1)
    compare(old, runs[1], "--map", r"old\.(.*)=\1")
    compare(old, runs[1], "--map", "old=new", "--map", r"new\.=")
    part = write(layers()[:20])
    out, _ = compare(part, runs[1], code=1)
    assert "only in the second" in out
    compare(part, runs[1], "--allow-missing")


def test_html(runs, tmp_path):
    target = tmp_path / "report.html"
    _, said = compare(*runs, "--html", target, code=1)
    assert f"wrote the report to {target}" in said
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "cannot write" in one_line(*runs, "--html", tmp_path / "no" / "report.html")


@pytest.mark.slow
def test_files(tmp_path):
    x = torch.arange(6.0).reshape(2, 3)
    torch.save(x, tmp_path / "x.pt")
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "y.npy", x.numpy() + 1)
    out, _ = compare(tmp_path / "x.pt", tmp_path / "x.npy")
    assert out.startswith("✓ agree")
    out, _ = compare(tmp_path / "x.pt", tmp_path / "y.npy", code=1)
    assert "6 of 6 elements" in out
    compare(tmp_path / "x.pt", tmp_path / "y.npy", "--atol", 1)
    out, _ = compare(tmp_path / "x.npy", tmp_path / "y.npy", "--json", code=1)
    found = json.loads(out)
    assert (found["of"], found["comparison"]["max_abs"]) == ("files", 1.0)
    assert "for runs only" in one_line(tmp_path / "x.pt", tmp_path / "x.npy", "--names", "x")
    assert "for runs only" in one_line(tmp_path / "x.pt", tmp_path / "x.npy", "--html", "r.html")


def test_bad_files(runs, tmp_path):
    good = tmp_path / "x.npy"
    np.save(good, np.ones(100))
    (tmp_path / "cut.npy").write_bytes(good.read_bytes()[:200])
    assert "no such file" in one_line("nothing", "nothing")
    assert "cut.npy cannot be read, it may be damaged" in one_line(tmp_path / "cut.npy", good)
    assert "a folder without run.json" in one_line(tmp_path, tmp_path)
    assert "can only be compared with a run" in one_line(runs[0], good)
    assert "does not exist" in one_line(runs[0], tmp_path / "nothing")


def test_bad_options(runs, tmp_path):
    assert "no such file" in one_line(*runs, "--rules", tmp_path / "none.toml")
    assert "pattern=replacement" in one_line(*runs, "--map", "nothing")
    assert "is invalid" in one_line(*runs, "--map", "(=x")
    assert "is invalid" in one_line(*runs, "--map", r"a(.*)=\2")
    assert "the name 'x'" in one_line(*runs, "--map", ".+=x")
    assert "not a regular expression" in one_line(*runs, "--names", "(")
    assert "steps must be like 10:20" in one_line(*runs, "--steps", "ten")
    assert "the first is after the last" in one_line(*runs, "--steps", "5:2")
    assert "unknown kind 'Wait'" in one_line(*runs, "--kinds", "Wait")
    assert "--ranks must look like 0,1" in one_line(*runs, "--ranks", "all")
    assert "must be a number of at least 0" in one_line(runs[0], runs[0], "--atol", "-1")
