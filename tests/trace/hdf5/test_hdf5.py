"""Values in HDF5 files: they come back bit for bit, and a kill leaves the file readable."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap.core.errors import MissingExtra, TensortapError
from tensortap.rooms.trace import hdf5
from tensortap.rooms.trace.hdf5 import link_name, path_of

ROOT = Path(__file__).parents[3]


def save(saver, path, values, iterations=None, ranks=None):
    lists = (
        list(values),
        list(range(len(values))) if iterations is None else list(iterations),
        [0] * len(values) if ranks is None else list(ranks),
    )
    saver(path, *lists)
    assert lists == ([], [], [])


def run(code, folder):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=folder, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, timeout=100, check=False,
    )  # fmt: skip


def read(path):
    """Return the values of each path without padding, and its columns, as plain h5py sees them."""
    found = {}
    with h5py.File(path) as file:
        for link, group in file.items():
            columns = {name: group[name][:].tolist() for name in ("iterations", "ranks")}
            count = len(columns["iterations"])
            rows = list(group["values"][:count])
            if "shapes" in group:
                shapes = group["shapes"][:count]
                rows = [row[(*map(slice, to),)] for row, to in zip(rows, shapes, strict=True)]
            dtype = group["values"].attrs["tensortap_dtype"]
            found[path_of(link)] = SimpleNamespace(values=rows, dtype=dtype, **columns)
    return found


def same(value, stored, dtype):
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        names = [str(value.dtype).removeprefix("torch.")]
    else:
        bits, own = np.asarray(value).tobytes(), np.asarray(value).dtype
        names = [own.name, own.str]
    stored = np.asarray(stored)
    return (np.shape(value), bits) == (stored.shape, stored.tobytes()) and dtype in names


VALUES = {
    "sizes vary": [torch.randn(3, 4), torch.randn(5, 2), torch.randn(1, 9)],
    "bfloat16": [torch.tensor([1.5, float("nan"), -0.0]).bfloat16()] * 2,
    "float8": [torch.randn(3, 4).to(torch.float8_e4m3fn), torch.ones(4, 3).to(torch.float8_e4m3fn)],
    "float8_e8m0": [torch.tensor([1.0, 4.0]).to(torch.float8_e8m0fnu)],
    "half": [torch.randn(7).half()],
    "bool": [torch.tensor([True, False, True])] * 3,
    "complex": [torch.randn(2, 2, dtype=torch.complex64)],
    "0-dim": [torch.tensor(3.5), torch.tensor(1.0)],
    "empty": [torch.zeros(0, 3), torch.zeros(2, 3), torch.zeros(4, 0)],
    "strided": [torch.randn(4, 5).T, torch.arange(10)[::2].float().reshape(1, 5)],
    "requires grad": [torch.randn(3, requires_grad=True)],
    "unsigned": [torch.tensor([2**63 + 5], dtype=torch.uint64)],
    "numpy": [np.arange(6).reshape(2, 3), np.arange(3).reshape(3, 1)],
    "numpy bfloat16": [np.ones(3, ml_dtypes.bfloat16)],
    "swapped": [np.arange(3, dtype=">f8")],
    "times": [np.array(["2026-01-02"], "M8[ns]")],
    "numpy scalar": [np.float32(3), np.float32(4)],
    "float": [1.5, float("inf")],
    "int": [1, -(2**63)],
    "bool number": [True, False],
    "complex number": [1 + 2j],
    "many rows": [torch.full((3,), i, dtype=torch.int32) for i in range(3000)],
    "large": [torch.randn(64, 1024) for _ in range(3)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"compression": "gzip", "compression_opts": 1}],
    ids=str,
)
def test_values_round_trip(tmp_path, options):
    saver = tap.HDF5(tmp_path / "x.h5", **options)
    for name, values in VALUES.items():
        save(saver, name, values[:1])
    for name, values in VALUES.items():
        if len(values) > 1:
            save(saver, name, values[1:], range(1, len(values)), [3] * (len(values) - 1))
    saver.close()
    found = read(tmp_path / "x.h5")
    assert set(found) == set(VALUES)
    for name, values in VALUES.items():
        stored = found[name]
        for value, row in zip(values, stored.values, strict=True):
            assert same(value, row, stored.dtype), (name, value, row)
        assert stored.iterations == list(range(len(values)))
        assert stored.ranks == [0] + [3] * (len(values) - 1)


def test_plain_h5py_reads_the_file(tmp_path):
    saver = tap.HDF5(tmp_path / "x.h5")
    save(saver, "forward.x", [torch.ones(2, 3), torch.ones(1, 4)], [5, 9], [0, 1])
    save(saver, "forward.h", [torch.tensor([1.5, -2.0]).bfloat16()])
    saver.close()
    with h5py.File(tmp_path / "x.h5") as file:
        values = file["forward.x/values"]
        assert values.shape == (2, 2, 4)
        assert values.dtype == np.float32
        assert values[:].sum() == 6 + 4  # padded with zeros
        assert file["forward.x/shapes"][:].tolist() == [[2, 3], [1, 4]]
        assert file["forward.x/iterations"][:].tolist() == [5, 9]
        assert file["forward.x/ranks"][:].tolist() == [0, 1]
        half = file["forward.h/values"]
        assert half.dtype == np.uint16
        assert half.attrs["tensortap_dtype"] == "bfloat16"
        assert half[0].view(ml_dtypes.bfloat16).tolist() == [1.5, -2.0]
        assert "shapes" not in file["forward.h"]


def test_stacked_values_keep_lists_of_iterations(tmp_path):
    saver = tap.HDF5(tmp_path / "x.h5")
    for start, count in ((0, 4), (4, 4), (8, 2)):
        values = [torch.randn(2, 3) for _ in range(count)]
        iterations, ranks = list(range(start, start + count)), [i % 2 for i in range(count)]
        tap.rooms.trace.stack_padded_tensors("x", values, iterations, ranks)
        saver("x", values, iterations, ranks)
    saver.close()
    assert saver.datasets["x"].shape == (3, 4, 2, 3)
    found = read(tmp_path / "x.h5")["x"]
    assert [v.shape[0] for v in found.values] == [4, 4, 2]
    assert found.iterations == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]
    assert found.ranks == [[0, 1, 0, 1], [0, 1, 0, 1], [0, 1, -1, -1]]


def test_chosen_dtypes(tmp_path):
    saver = tap.HDF5(tmp_path / "x.h5", float_dtype="float16", int_dtype=torch.int16)
    save(saver, "x", [torch.tensor([1.0, 1e9]), torch.tensor([0.5]).bfloat16()])
    save(saver, "i", [torch.tensor([7]), torch.tensor([8], dtype=torch.uint8)])
    save(saver, "b", [torch.tensor([True])])
    values, iterations, ranks = [torch.tensor([1]), torch.tensor([40_000])], [0, 1], [0, 0]
    with pytest.raises(TensortapError, match=r"cannot hold values from 40000"):
        saver("i", values, iterations, ranks)
    assert (len(values), iterations, ranks) == (1, [1], [0])
    saver.close()
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x/values"].dtype == np.float16
        assert file["x/values"][:].tolist() == [[1.0, float("inf")], [0.5, 0.0]]
        assert file["i/values"].dtype == np.int16
        assert file["i/values"][:].tolist() == [[7], [8], [1]]
        assert file["b/values"].dtype == np.bool_


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.ones(2), torch.ones(2).double(), "holds float32, this value is float64"),
        (torch.ones(2), torch.ones(2, 2), "rows of 1 dimensions, this value has 2"),
        (torch.ones(2), "text", "not a str: trace its parts"),
        (1.5, None, "not a NoneType: trace its parts"),
        (1.5, {"a": 1.5}, "not a dict: trace its parts"),
        (1, 2**70, "more than 64 bits"),
        (torch.ones(2), torch.ones(2).to_sparse(), "to_dense"),
    ],
)
def test_values_that_do_not_fit_stay_in_the_lists(tmp_path, first, second, message):
    saver = tap.HDF5(tmp_path / "x.h5")
    values, iterations, ranks = [first, second, first], [0, 1, 2], [0, 0, 0]
    with pytest.raises(TensortapError, match=message):
        saver("path", values, iterations, ranks)
    assert values[0] is second
    assert (len(values), iterations, ranks) == (1, [1], [0])
    saver.close()
    assert read(saver.path)["path"].iterations == [0, 2]


def test_rejects_lists_of_different_lengths(tmp_path):
    with pytest.raises(TensortapError, match="2 values, 1 iterations and 2 ranks"):
        tap.HDF5(tmp_path / "x.h5")("x", [1.0, 2.0], [0], [0, 0])


def test_existing_file(tmp_path):
    path = tmp_path / "deep" / "x.h5"
    saver = tap.HDF5(path)
    save(saver, "x", [1.0])
    saver.close()
    with pytest.raises(TensortapError, match="already exists: exists='keep' appends"):
        tap.HDF5(path)
    kept = tap.HDF5(path, exists="keep")
    save(kept, "x", [2.0], [7])
    save(kept, "y", [5])
    kept.close()
    found = read(path)
    assert (found["x"].values, found["x"].iterations) == ([1.0, 2.0], [0, 7])
    assert found["y"].values == [5]
    replaced = tap.HDF5(path, exists="replace")
    assert set(read(path)) == {"x", "y"}  # until the first value
    save(replaced, "z", [3.0])
    replaced.close()
    assert set(read(path)) == {"z"}
    assert os.listdir(path.parent) == ["x.h5"]
    with pytest.raises(TensortapError, match="got 'append'"):
        tap.HDF5(path, exists="append")


def test_rejects_file_of_another_program(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["mine"] = 1
    saver = tap.HDF5(tmp_path / "x.h5", exists="keep")
    with pytest.raises(TensortapError, match="not written by tensortap"):
        save(saver, "x", [1.0])


def test_value_after_close_opens_the_file_again(tmp_path):
    saver = tap.HDF5(tmp_path / "x.h5")
    assert dict(saver.datasets) == {}
    save(saver, "x", [1.0])
    assert saver.datasets["x"][:].tolist() == [1.0]  # while it is written
    saver.close()
    saver.close()
    assert saver.datasets["x"][:].tolist() == [1.0]
    save(saver, "x", [2.0])
    saver.close()
    assert saver.datasets["x"][:].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"float_dtype": "int8"}, "float_dtype must be .* got 'int8'"),
        ({"int_dtype": "float32"}, "int_dtype must be .* got 'float32'"),
        ({"float_dtype": object}, "must be the name of a dtype"),
        ({"compression": "bogus"}, "compression='bogus'"),
        ({"compression": "gzip", "compression_opts": 99}, "compression_opts=99"),
        ({"compression_opts": 4}, "needs compression="),
    ],
)
def test_rejects_invalid_options(tmp_path, options, message):
    with pytest.raises(TensortapError, match=message):
        tap.HDF5(tmp_path / "x.h5", **options)


def test_without_h5py(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtra, match="HDF5 needs h5py: pip install h5py"):
        tap.HDF5(tmp_path / "x.h5")


def test_each_rank_has_its_own_file(tmp_path, monkeypatch):
    saver = tap.HDF5(tmp_path / "x.h5")
    monkeypatch.setattr("tensortap.rooms.trace.hdf5.rank_and_world_size", lambda: (3, 4))
    assert saver.path == tmp_path / "x_rank3.h5"


def test_link_names_round_trip():
    for path in ("forward.x", "a/b", "50%", "%2F", "nul\0", "ü.'a.b'"):
        assert path_of(link_name(path)) == path
        assert not {"/", "\0"} & set(link_name(path))


# -- crash safety -------------------------------------------------------------------------


GROW = """
import numpy as np

def grow(saver, step):
    '''A step that changes the file in every way: rows, sizes, paths, small and large.'''
    saver("x", [np.full((64, 64), float(step))], [step], [0])
    saver("sizes", [np.full((1 + step % 7, 1 + step // 7), float(step))], [step], [0])
    if step % 5 == 0:
        saver(f"new {step}", [step], [step], [0])
"""
WRITER = """
import sys, tensortap as tap
from tensortap.rooms.trace import hdf5
hdf5._FLUSH_INTERVAL = 1e9
saver = tap.HDF5(sys.argv[1], **eval(sys.argv[2]))
flushed, steps = eval(sys.argv[3])
for step in range(steps):
    grow(saver, step)
    if step < flushed:
        saver.flush()
print("ready", flush=True)
sys.stdin.read()
"""


def _check(found, confirmed):
    """Check that the file holds a prefix of the steps, at least the confirmed ones."""
    for name in ("x", "sizes"):
        stored = found[name]
        steps = stored.iterations
        assert steps == list(range(len(steps)))
        assert len(steps) > confirmed
        for step, value in zip(steps, stored.values, strict=True):
            assert (value == step).all()
            assert value.shape == ((64, 64) if name == "x" else (1 + step % 7, 1 + step // 7))
    for name, stored in found.items():
        if name.startswith("new"):
            assert stored.values == [int(name.split()[1])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "unflushed"), [({}, 30), ({}, 0), ({"compression": "gzip"}, 1)], ids=str
)
def test_kill_9_keeps_what_was_flushed(tmp_path, options, unflushed):
    path = tmp_path / "x.h5"
    steps = 40, 40 + unflushed
    child = subprocess.Popen(
        [sys.executable, "-c", GROW + WRITER, str(path), repr(options), repr(steps)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, text=True, cwd=tmp_path,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "ready\n"
    finally:
        child.kill()
        child.communicate(timeout=60)
    _check(read(path), 39)
    kept = tap.HDF5(path, exists="keep", **options)
    save(kept, "x", [np.full((64, 64), 7.0)], [1000])
    save(kept, "after", [1.0])
    kept.close()
    found = read(path)
    assert found["x"].iterations[:40] == list(range(40))
    assert found["x"].iterations[-1] == 1000
    assert (found["x"].values[-1] == 7).all()


def test_default_flush_interval(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(hdf5, "time", SimpleNamespace(monotonic=lambda: now))
    saver = tap.HDF5(tmp_path / "x.h5")
    seen = []
    for step in range(6):
        now += 0.09
        save(saver, "x", [float(step)], [step])
        seen.append(len(read(saver.path)["x"].values))
    assert seen == [1, 1, 1, 4, 4, 4]
    saver.close()
    assert len(read(saver.path)["x"].values) == 6


def test_only_one_program_writes_a_file(tmp_path):
    saver = tap.HDF5(tmp_path / "x.h5")
    save(saver, "x", [1.0])
    code = f"""
        import tensortap as tap
        try:
            tap.HDF5({str(saver.path)!r}, exists="keep")("x", [2.0], [1], [0])
        except tap.TensortapError as error:
            print(error)
    """
    done = run(code, tmp_path)
    assert "already being written" in done.stdout
    read(saver.path)  # does not release the lock
    with pytest.raises(TensortapError, match="by this or another program"):
        save(tap.HDF5(saver.path, exists="keep"), "x", [2.0])
    saver.close()
    assert read(saver.path)["x"].values == [1.0]


def test_program_that_ends_without_closing(tmp_path):
    code = """
        import os, sys, tensortap as tap
        saver = tap.HDF5("x.h5")
        saver("x", [1.0, 2.0], [0, 1], [0, 0])
        if os.fork() == 0:
            try:
                saver("x", [3.0], [2], [0])
            except tap.TensortapError as error:
                print(error)
            sys.exit(0)
        assert os.wait()[1] == 0
        saver("x", [4.0], [3], [0])
    """
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"this is a fork of the process that writes {tmp_path / 'x.h5'}" in done.stdout
    assert read(tmp_path / "x.h5")["x"].values == [1.0, 2.0, 4.0]
    assert os.listdir(tmp_path) == ["x.h5"]


@pytest.mark.slow
def test_full_disk(tmp_path):
    """A limit on the size of files stands for a full disk."""
    code = """
        import resource, signal, numpy as np, tensortap as tap
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        saver = tap.HDF5("x.h5")
        saver("x", [np.ones(1000)], [0], [0])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        values = [np.ones(10_000)]
        iterations, ranks = [1], [0]
        try:
            saver("x", values, iterations, ranks)
        except tap.TensortapError as error:
            print(error)
        print(len(values), saver.datasets["x"].parent["iterations"][:])
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        saver("x", values, iterations, ranks)
        print(len(values), saver.datasets["x"].shape)
        saver.close()
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"x cannot be written to {tmp_path / 'x.h5'}" in lines[0]
    assert lines[1:] == ["1 [0]", "0 (2, 10000)"]
    found = read(tmp_path / "x.h5")["x"]
    assert [len(v) for v in found.values] == [1000, 10_000]
