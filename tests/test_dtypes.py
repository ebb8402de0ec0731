import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensortap.dtypes import ITEMSIZE, itemsize, name_of, numpy_dtype
from tensortap.errors import CaptureError

NUMPY_ONLY = [
    "<M8[ns]", "<M8[7us]", "<M8", "<m8[D]", ">M8[s]", "<U5", ">U3", "|S3", "|V8",
    ">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16",
    np.dtype(np.longdouble).str, np.dtype(np.clongdouble).str,
]  # fmt: skip


@pytest.mark.parametrize("name", ITEMSIZE)
def test_a_name_means_the_same_size_everywhere(name):
    assert numpy_dtype(name).itemsize == itemsize(name)
    if isinstance(getattr(torch, name, None), torch.dtype):
        assert getattr(torch, name).itemsize == itemsize(name)


def test_every_dtype_of_torch_that_holds_plain_data_has_a_name():
    every = {getattr(torch, n) for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)}
    named = {getattr(torch, n) for n in ITEMSIZE if hasattr(torch, n)}
    assert {str(d) for d in every - named} == {
        "torch.qint8", "torch.qint32", "torch.quint8", "torch.quint2x4", "torch.quint4x2",
    }  # fmt: skip


def test_every_dtype_of_ml_dtypes_has_its_own_name():
    scalars = [
        getattr(ml_dtypes, n) for n in dir(ml_dtypes) if isinstance(getattr(ml_dtypes, n), type)
    ]
    found = [np.dtype(s) for s in scalars if issubclass(s, np.generic)]
    assert len(found) > 15
    for dtype in found:
        assert name_of(dtype) == dtype.name
        assert numpy_dtype(dtype.name) == dtype


@pytest.mark.parametrize("name", NUMPY_ONLY)
def test_what_only_numpy_has_goes_by_its_str(name):
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
def test_hostile_names_are_refused(name):
    with pytest.raises(ValueError, match="no dtype is called"):
        itemsize(name)


@given(st.text(max_size=12))
def test_any_text_is_a_known_name_or_refused(name):
    try:
        size = itemsize(name)
    except ValueError:
        return
    assert numpy_dtype(name).itemsize == size


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (np.dtype(object), "tolist"),
        (np.dtype([("a", "f4"), ("b", "i4")]), r"array\['a'\]"),
        (np.dtypes.StringDType(), "astype"),
    ],
)
def test_what_has_no_bytes_is_refused_with_a_remedy(dtype, remedy):
    with pytest.raises(CaptureError, match=remedy):
        name_of(dtype)
