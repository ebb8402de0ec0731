"""Every kind of value, from one program to another, bit for bit."""

from __future__ import annotations

import pytest

from tensortap.api.lookup import get as fetch
from tests.live import catalogue

SEND = """
    import tensortap as tap
    from tests.live import catalogue
    values = catalogue.{values}()
    for name, value in values.items():
        tap.catch(value, name)
    assert tap.flush(60)
    receipt = tap.receipt()
    assert receipt.captured == len(values) and not receipt.dropped, str(receipt)
    print(receipt.sessions.popitem()[1])
"""
PATHS = {"shared memory": {}, "TCP": {"TENSORTAP_NO_ARENA": "1"}}


@pytest.fixture(autouse=True, scope="module")
def narrow_again():
    """The catalogue has 64-bit values of JAX; other tests of this process are to have none."""
    import jax

    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("framework", catalogue.VALUES)
def test_every_dtype_and_layout_arrives_bit_for_bit(server, run, framework, path):
    program = run(SEND.format(values=f"{framework}_values"), **PATHS[path])
    sent = catalogue.VALUES[framework]()
    assert program.end().strip().endswith(path)
    wrong = {}
    for name, value in sent.items():
        expected, got = catalogue.bits(value), catalogue.bits(fetch(server.history, name))
        if got != expected:
            wrong[name] = (expected[:3], got[:3])
    assert not wrong
    assert server.history.written == len(sent) > 50


@pytest.mark.parametrize("path", PATHS)
def test_nested_values_arrive_unchanged(server, run, path):
    run(SEND.format(values="nested"), **PATHS[path]).end()
    wrong = {
        name: fetch(server.history, name)
        for name, value in catalogue.nested().items()
        if not catalogue.same(value, fetch(server.history, name))
    }
    assert not wrong


def test_torch_tensors_and_jax_arrays_in_containers(server, run):
    import jax
    import torch

    run("""
        import jax.numpy as jnp, numpy as np, torch, tensortap as tap
        big = torch.arange(20_000).bfloat16()
        value = {"t": [big, big[::2], torch.tensor(1.5)], "j": (jnp.ones(3), jnp.zeros((99, 99)))}
        assert tap.catch(value, "mixed").wait(60)
    """).end()
    got = fetch(server.history, "mixed")
    assert list(got) == ["t", "j"]
    expected = torch.arange(20_000).bfloat16()
    assert got["t"][0].dtype is torch.bfloat16
    assert got["t"][0].equal(expected)
    assert got["t"][1].equal(expected[::2])
    assert got["t"][2].item() == 1.5
    assert isinstance(got["j"], tuple)
    assert all(isinstance(part, jax.Array) for part in got["j"])
    assert got["j"][1].shape == (99, 99)


def test_other_objects_arrive_as_type_and_repr(server, run):
    run("""
        import tensortap as tap
        class Config:
            def __repr__(self): return "Config(lr=0.1)"
        assert tap.catch([Config(), 1], "config").wait(60)
    """).end()
    first, second = fetch(server.history, "config")
    assert (first.type, first.repr, second) == ("__main__.Config", "Config(lr=0.1)", 1)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_session_without_the_framework_gets_numpy(serving, run, framework):
    import ml_dtypes
    import numpy as np

    where = serving(prelude="import sys; sys.modules['torch'] = sys.modules['jax'] = None")
    run(SEND.format(values=f"{framework}_values"), to=where.address).end()
    sent = catalogue.VALUES[framework]()
    names = "float32 large, bfloat16 small, float8_e5m2 large, complex64 one, bool small"
    for name in names.split(", "):
        value = catalogue.bits(sent[name])
        said = where.ask(
            f"(lambda x: [type(x).__name__, x.dtype.name, list(x.shape), x.tobytes().hex()])"
            f"(tap.get({name!r}))"
        )
        dtype = value[1].removeprefix("torch.")
        assert said == ["ndarray", dtype, list(value[2]), value[3].hex()]
    assert np.dtype(ml_dtypes.bfloat16).name == "bfloat16"
    kinds = where.ask("sorted({type(tap.get(n)).__name__ for n in server.history.names()})")
    assert kinds == ["ndarray"]
