"""Trainer and engine record versions: a session names the first that did not arrive."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import tensortap as tap
from tensortap.alerts import alert_of
from tensortap.core.errors import NotFound
from tensortap.core.record import Kind
from tensortap.rooms.align import recorded_digests, watch
from tests.processes import wait_for

TRAINER = """
from torch.distributed.fsdp import fully_shard
folder = os.environ["FOLDER"]
torch.manual_seed(0)
model = nn.Module()
model.model = nn.Module()
for name in ("q_proj", "k_proj", "v_proj", "out"):
    model.model.add_module(name, nn.Linear(8, 8, bias=False))
fully_shard(model)
for version in range(5):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5
    whole = {name: each.full_tensor() for name, each in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, f"{folder}/{version}.pt")
    result = len(tap.digest(model).record("policy", version=version).history)
assert tap.flush(60)
"""

ENGINE = """
import os, torch, tensortap as tap
folder = os.environ["FOLDER"]
held = torch.nn.Module()
for version in range(5):
    weights = torch.load(f"{folder}/{version}.pt")
    if version >= 3:  # one of the parts does not arrive
        weights["model.v_proj.weight"] = torch.load(f"{folder}/2.pt")["model.v_proj.weight"]
    parts = [weights[f"model.{name}_proj.weight"] for name in "qkv"]
    held.qkv_proj, held.out = torch.nn.Module(), torch.nn.Module()
    held.qkv_proj.weight = torch.nn.Parameter(torch.cat(parts).bfloat16())
    held.out.weight = torch.nn.Parameter(weights["model.out.weight"].bfloat16())
    tap.digest(held).record("policy", version=version)
assert tap.flush(60)
"""


def alerts_in(history):
    return [alert_of(each) for each in history.records("policy", kind=Kind.ALERT)]


@pytest.mark.slow
def test_a_session_names_the_first_version_that_did_not_arrive(
    server, gloo, run_program, tmp_path, caplog
):
    settings = {"TENSORTAP_SERVER": str(server.address), "FOLDER": str(tmp_path)}
    assert gloo(TRAINER, world=2, **settings) == [4, 4]
    wait_for(lambda: len(server.history.records("policy")) == 5)  # only rank 0 sends
    run_program(tmp_path, ENGINE, env=settings)
    wait_for(lambda: alerts_in(server.history))
    (alert,) = alerts_in(server.history)
    assert (alert.rule, alert.step) == ("weights", 3)
    assert "version 3 has not arrived in program.py" in alert.message
    assert "1 of 2 weights agree, 1 of them after a cast, 1 are those of" in alert.message
    assert alert.message.endswith(
        "model.q_proj.weight + model.k_proj.weight + model.v_proj.weight → qkv_proj.weight: "
        "the second has model.v_proj.weight of version 2"
    )
    digests = recorded_digests(server.history, "policy")
    assert [each.version for each in digests] == [0, 1, 2, 3, 4] * 2
    assert tap.compare(digests[2], digests[7])
    assert tap.compare(digests[4], digests[9]).wrong[0].version == 2


def test_versions_in_a_run(tmp_path):
    path = tap.init(tmp_path)
    for version in range(20):
        found = tap.digest({"w": np.arange(version + 3.0)}).record("policy", version=version)
    tap.finish()
    assert [each.version for each in found.history] == list(range(18, 2, -1))
    digests = recorded_digests(tap.open(path), "policy")
    assert digests[-1] == found
    with pytest.raises(NotFound, match="no digest was recorded as 'other'"):
        recorded_digests(tap.open(path), "other")


def test_records_of_others_are_no_digests(server, caplog):
    record = msgspec.structs.replace
    path = tap.digest({"w": np.ones(2)})
    found = watch.DigestWatch(server)
    base = watch.Record("x", Kind.VALUE, 0, 0, 0, 0, 1, 1)
    text = msgspec.json.encode(path).decode().replace(path.rows["w"].digest, "no digits")
    for number, value in enumerate((text, "[" * 5000, 3, "{}")):
        content = watch.Mapping(((watch.KEY, value),))
        server.history.write([record(base, name=f"x{number}", value=content)])
    server.history.write([record(base, name="y", value="plain")])
    assert found.poll() == []
    assert "x0 is not a digest" in caplog.text
    assert "x1 is not a digest" in caplog.text
