"""Plain files round-trip, and untrusted files run no code."""

import os
import pickle

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

from tensortap.core.errors import NotFound, TensortapError
from tensortap.rooms.dump import files
from tensortap.values.view import as_numpy


def back(obj, tmp_path):
    form = files.format_of(obj)
    path = tmp_path / f"x{form.suffix}"
    form.save(obj, path)
    return path, files.load_file(path, trust=form.suffix == ".pkl")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_arrays_of_any_dtype_round_trip(tmp_path, name):
    array = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name))
    path, found = back(array, tmp_path)
    assert path.suffix == ".npy"
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()
    assert found.shape == (2, 3)
    plain = np.load(path)  # NumPy alone sees the bits, under the name of the dtype
    assert plain.dtype.names == (name,)


def test_jax_arrays_are_saved_as_npy(tmp_path):
    path, found = back(jnp.arange(3, dtype=jnp.bfloat16), tmp_path)
    assert path.suffix == ".npy"
    assert found.astype(float).tolist() == [0.0, 1.0, 2.0]
    assert found.dtype == ml_dtypes.bfloat16


def test_array_of_objects_is_saved_as_pickle(tmp_path):
    path, found = back(np.array([1, "a", None], object), tmp_path)
    assert path.suffix == ".pkl"
    assert found.tolist() == [1, "a", None]


def test_tensors_within_containers_round_trip(tmp_path):
    value = {
        "a": [torch.arange(3), torch.ones(2, dtype=torch.float8_e4m3fn)],
        "p": torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
        "n": (np.ones(2), np.float32(3), ml_dtypes.bfloat16, np.float32),
        "t": (torch.float32, torch.Size([2]), torch.device("cpu")),
        "j": jnp.arange(2),
    }
    path, found = back(value, tmp_path)
    assert path.suffix == ".pkl"
    with path.open("rb") as stream:
        plain = pickle.load(stream)  # anybody with torch reads it
    for got in (found, plain):
        assert got["a"][0].tolist() == [0, 1, 2]
        assert got["a"][1].view(torch.uint8).tolist() == value["a"][1].view(torch.uint8).tolist()
        assert isinstance(got["p"], torch.nn.Parameter)
        assert got["p"].dtype == torch.bfloat16
        assert got["n"][0].tolist() == [1.0, 1.0]
        assert got["n"][1:] == value["n"][1:]
        assert got["t"] == value["t"]
        assert got["j"].tolist() == [0, 1]


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".pkl"])
def test_damaged_file_raises_clear_error(tmp_path, suffix):
    value = {".pt": torch.arange(100), ".npy": np.arange(100), ".pkl": {"a": np.arange(100)}}
    path, _ = back(value[suffix], tmp_path)
    whole = path.read_bytes()
    for cut in (0, 1, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(TensortapError, match=r"x\.|read"):
            files.load_file(path, trust=suffix == ".pkl")


def test_no_such_file_and_unknown_suffix(tmp_path):
    with pytest.raises(NotFound, match="no such file"):
        files.load_file(tmp_path / "x.npy")
    with pytest.raises(TensortapError, match=r"the formats are \.npy"):
        files.load_file(tmp_path / "x.xyz")


@pytest.mark.attack("file shortened while it is read")
def test_file_that_is_shortened_while_it_is_used_raises(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.arange(100_000.0), "b": np.ones(3)}, path)
    tensors = files.load_file(path, mapped=True)
    os.truncate(path, 4096)
    with pytest.raises(TensortapError, match="has become shorter"):
        as_numpy(tensors["a"])


@pytest.mark.attack("pipe instead of a file")
@pytest.mark.parametrize("suffix", [".pt", ".npy", ".pkl", ".safetensors"])
def test_opens_only_regular_files(tmp_path, suffix):
    os.mkfifo(tmp_path / f"x{suffix}")
    with pytest.raises(TensortapError, match="is not a regular file"):
        files.load_file(tmp_path / f"x{suffix}")
