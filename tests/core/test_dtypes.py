import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from tensortap.core.dtypes import DTYPES, itemsize, name_of, numpy_dtype
from tensortap.core.errors import CaptureError
from tensortap.stats import _kernel as kernel
from tensortap.stats import numpy_summary
from tensortap.stats.summarize import code_of, summarize_array

NUMPY_ONLY = [
    "<M8[ns]", "<M8[7us]", "<M8", "<m8[D]", ">M8[s]", "<U5", ">U3", "|S3", "|V8",
    ">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16",
    np.dtype(np.longdouble).str, np.dtype(np.clongdouble).str,
]  # fmt: skip


def named(rows):
    return {"argvalues": list(rows), "ids": [row.name for row in rows]}


class TestRegistry:
    """Every column of a row, checked against the framework that it speaks of."""

    @pytest.mark.parametrize("row", **named(DTYPES.values()))
    def test_sizes_agree(self, row):
        assert numpy_dtype(row.name).itemsize == itemsize(row.name) == row.itemsize
        if row.torch:
            assert getattr(torch, row.torch).itemsize == row.itemsize

    @pytest.mark.parametrize("row", **named(row for row in DTYPES.values() if row.numpy))
    def test_numpy_has_the_dtype(self, row):
        module, _, name = row.numpy.rpartition(".")
        dtype = np.dtype(getattr(ml_dtypes, name) if module else name)
        assert name_of(dtype) == row.name
        assert numpy_dtype(row.name) == dtype

    @pytest.mark.parametrize("row", **named(row for row in DTYPES.values() if row.jax))
    def test_jax_has_the_dtype(self, row):
        assert jnp.dtype(getattr(jnp, row.jax)) == numpy_dtype(row.name)

    @pytest.mark.parametrize(
        "row", **named([row for row in DTYPES.values() if row.format and row.numpy])
    )
    def test_float_formats(self, row):
        info = ml_dtypes.finfo(row.part or row.name)
        assert row.format == (info.nmant + 1, info.minexp, float(info.max))
        smallest, largest = math.frexp(info.smallest_subnormal)[1], math.frexp(info.max)[1]
        assert row.exponents == (smallest - 1, largest - 1)

    def test_every_dtype_of_torch_that_holds_plain_data_has_a_row(self):
        theirs = {n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)}
        known = {getattr(torch, row.torch) for row in DTYPES.values() if row.torch}
        assert {str(d) for d in {getattr(torch, n) for n in theirs} - known} == {
            "torch.qint8", "torch.qint32", "torch.quint8", "torch.quint2x4", "torch.quint4x2",
        }  # fmt: skip

    def test_every_dtype_of_ml_dtypes_has_a_row(self):
        scalars = [getattr(ml_dtypes, name) for name in dir(ml_dtypes)]
        theirs = {np.dtype(s).name for s in scalars
                  if isinstance(s, type) and issubclass(s, np.generic)}  # fmt: skip
        assert theirs == {row.name for row in DTYPES.values() if "ml_dtypes" in row.numpy}

    def test_safetensors_knows_its_names(self):
        from safetensors.numpy import load, save

        rows = [row for row in DTYPES.values() if row.safetensors]
        arrays = {row.name: np.zeros(2, numpy_dtype(row.name)) for row in rows}
        plain = {name: array for name, array in arrays.items() if DTYPES[name].numpy == name}
        data = save(plain)
        for name in plain:
            assert f'"dtype":"{DTYPES[name].safetensors}"'.encode() in data
        assert set(load(data)) == set(plain)


class TestKernel:
    """The dtypes of the C kernel, checked against the registry."""

    @staticmethod
    def constants(kernel):
        return {name for name in vars(kernel) if name.isupper()}

    def test_constants_are_the_dtypes_of_more_than_one_byte(self):
        rows = [row for row in DTYPES.values() if row.numpy == row.name and row.itemsize > 1]
        wide = {row.name.upper() for row in (*rows, DTYPES["bfloat16"])}
        assert self.constants(kernel) == wide

    @pytest.mark.parametrize("name", sorted(constants(kernel)))
    def test_the_kernel_reads_elements_as_the_registry_describes_them(self, name):
        row = DTYPES[name.lower()]
        array = np.array([1, 2, 3], numpy_dtype(row.name))
        assert code_of(row.name) == getattr(kernel, name)
        found = summarize_array(array)
        assert (found.count, found.mean, found.max) == (3, 2.0, 3.0)
        assert found == numpy_summary.summarize_array(array)

    @pytest.mark.parametrize("row", **named(row for row in DTYPES.values() if row.itemsize == 1))
    def test_dtypes_of_one_byte_have_a_code(self, row):
        assert (code_of(row.name) is not None) == bool(row.numpy)


@pytest.mark.parametrize("name", NUMPY_ONLY)
def test_dtypes_of_numpy_alone_go_by_their_str(name):
    dtype = np.dtype(name)
    assert name_of(dtype) == name
    assert itemsize(name) == dtype.itemsize
    assert numpy_dtype(name) == dtype


@pytest.mark.parametrize("alias", [np.intc, np.longlong, np.long, "<i4", "=f8", "?"])
def test_aliases_have_one_name(alias):
    assert name_of(np.dtype(alias)) == np.dtype(alias).name


@pytest.mark.parametrize(
    "name",
    [
        "", "float", "Float32", "float32 ", " float32", "float32\n", "float32\0", "object", "O",
        "|O", "<O8", "<f4", "<i8", "|b1", "<f3", ">f16x", ">i1", "<U", "<U0", "<U-1", "<U1e3",
        "<U99999999999", "|S0", "|V", "|V0", "<M8[xs]", "<M8[ns", "<M8[ns]]", "<M8[1234567890ns]",
        "<M8[ns/2]", "<U٣", "<U５", "os.system", "__import__('os')", "i4,i4", "(2,3)f4",
        "{'names':['a']}", "T", "StringDType()", "<U5\n", "torch.float32", "a" * 10_000,
        "qint8", "float32,", "numpy.float32", "dtype", "V8", "S3", "U5", "M8[ns]",
    ],
)  # fmt: skip
def test_rejects_hostile_names(name):
    with pytest.raises(ValueError, match="no dtype is called"):
        itemsize(name)


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (np.dtype(object), "tolist"),
        (np.dtype([("a", "f4"), ("b", "i4")]), r"array\['a'\]"),
        (np.dtypes.StringDType(), "astype"),
    ],
)
def test_errors_for_dtypes_without_bytes_name_a_remedy(dtype, remedy):
    with pytest.raises(CaptureError, match=remedy):
        name_of(dtype)
