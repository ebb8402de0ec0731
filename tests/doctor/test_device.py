"""`tensortap doctor --device`, where the device is the CPU."""

import json
from dataclasses import replace

import jax
import pytest

import tensortap as tap
from tensortap.rooms.doctor import contract
from tensortap.rooms.doctor.jax import JaxContract
from tests.commands import type_in

CHECKS = [
    "snapshots and rebuilt values", "digests", "statistics, against the CPU",
    "caught, overwritten, read from a run", "training, bit for bit", "cost",
    "tap.catch does not wait", "tap.track does not wait",
]  # fmt: skip


def examined(device, code):
    ended, out, said = type_in("doctor", "--device", device, "--json")
    assert ended == code, out + said
    (rows,) = json.loads(out).values()
    assert [row["check"] for row in rows] == CHECKS
    return {row["check"]: row["result"] for row in rows}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("device", "waits"), [("cpu", "note"), ("jax", "ok")])
def test_a_device_that_is_right(device, waits):
    results = examined(device, 0)
    expected = dict.fromkeys(CHECKS, "ok") | {"cost": "note"}
    assert results == expected | dict.fromkeys(CHECKS[-2:], waits)


@pytest.mark.slow
def test_a_device_that_is_wrong(monkeypatch):
    rebuild, summary_of, train = contract.rebuild, contract.summary_of, JaxContract.train

    def trained(self, track):
        return (bits + b"1" * (track is not None) for bits in train(self, track))

    def caught(value, name):
        if name == "product":
            jax.block_until_ready(value)

    monkeypatch.setattr(contract, "rebuild", lambda node: rebuild(node)[..., ::-1])
    monkeypatch.setattr(
        contract, "summary_of", lambda value: (replace(summary_of(value)[0], nans=99), None)
    )
    monkeypatch.setattr(contract, "digest_of", lambda value: bytes(16))
    monkeypatch.setattr(JaxContract, "train", trained)
    monkeypatch.setattr(tap, "catch", caught)
    results = examined("jax", 1)
    expected = dict.fromkeys(CHECKS, "FAILED") | {"cost": "note", CHECKS[-1]: "ok"}
    assert results == expected


def test_the_table_names_what_failed(monkeypatch):
    rows = [{"check": "digests", "result": "FAILED", "details": "float32: [red]no[/red]"}]
    monkeypatch.setattr("tensortap.rooms.doctor.device.contracts", lambda device: [(device, None)])
    monkeypatch.setattr("tensortap.rooms.doctor.device.examine_device", lambda contract: rows)
    code, out, _ = type_in("doctor", "--device", "cpu")
    assert code == 1
    assert "digests" in out
    assert "float32: [red]no[/red]" in out
