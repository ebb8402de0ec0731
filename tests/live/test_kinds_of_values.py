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


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("framework", "path"),
    [("numpy", "shared memory"), ("numpy", "TCP"), ("torch", "shared memory")],
)
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


NESTED = """{
    "list": [1, (2.5, None, True), []], "dict": {1: -1j, (1, 2): {4}, None: {}}, "big": -(10**400),
    "bytes": bytes(range(256)), "text": "μ 🙂" * 50_000, "floats": [-0.0, 5e-324, float("inf")],
}"""


def test_nested_values_arrive_unchanged(server, run):
    run(f"import tensortap as tap; assert tap.catch({NESTED}, 'nested').wait(60)").end()
    assert repr(fetch(server.history, "nested")) == repr(eval(NESTED))


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
def test_a_session_without_the_framework_gets_numpy(serving, run):
    where = serving(prelude="import sys; sys.modules['torch'] = sys.modules['jax'] = None")
    run(SEND.format(values="torch_values"), to=where.address).end()
    sent = catalogue.torch_values()
    names = "float32 large, bfloat16 small, float8_e5m2 large, complex64 one, bool small"
    for name in names.split(", "):
        value = catalogue.bits(sent[name])
        said = where.ask(
            f"(lambda x: [type(x).__name__, x.dtype.name, list(x.shape), x.tobytes().hex()])"
            f"(tap.get({name!r}))"
        )
        dtype = value[1].removeprefix("torch.")
        assert said == ["ndarray", dtype, list(value[2]), value[3].hex()]
    kinds = where.ask("sorted({type(tap.get(n)).__name__ for n in server.history.names()})")
    assert kinds == ["ndarray"]
