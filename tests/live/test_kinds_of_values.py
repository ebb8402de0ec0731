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
