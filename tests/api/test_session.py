"""The verbs of a live session."""

from __future__ import annotations

import keyword

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensortap as tap
from tensortap.api import session as live
from tensortap.api.session import identifier
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Items, Kind, Mapping, Number
from tests.runs.readers.contract import RECORDS, record


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("loss", "loss"), ("blocks.3.attn", "blocks_3_attn"), ('xs["a"][0]', "xs_a_0"),
        ("3rd", "_3rd"), ("class", "class_"), ("lambda", "lambda_"), ("match", "match"),
        ("_private", "private"), ("__builtins__", "builtins"), ("größe", "größe"), ("x²", "x2"),
        ("½", "_1_2"), ("ﬁne", "fine"), ("...", "value"), ("", "value"), ("a - b", "a_b"),
        ("\x1b[2J", "_2J"), ("٣", "_٣"),
    ],
)  # fmt: skip
def test_identifier(name, variable):
    assert identifier(name) == variable


@pytest.mark.slow
@given(st.text(max_size=30))
def test_every_name_gives_a_valid_identifier(name):
    variable = identifier(name)
    assert variable.isidentifier()
    assert not keyword.iskeyword(variable)
    space = {variable: "found"}
    assert eval(variable, space) == "found", "Python reads it as another name"


def test_ingest_all(server, capsys):
    space = {"__name__": "notebook", "weights": "mine"}
    server.history.write(RECORDS)
    server.history.write([record(20, "print", 1), record(21, "both!", 3)])
    exec("import tensortap as tap; found = tap.serve().ingest_all()", space)
    assert space["loss"] == 1.0
    assert space["weights"] == "mine"
    assert space["grads"].tolist() == [1]
    assert space["grads_rank1"].tolist() == [2]
    assert space["tree"][1:] == ["text", None]
    assert {space["both"], space["both_1"], space["both_2"]} == {1, 2, 3}
    assert "print" not in space
    said = capsys.readouterr().out
    assert "not replaced: weights, print (overwrite=True replaces them)" in said
    assert space["found"]["loss"] == "loss"
    exec("import tensortap as tap; found = tap.serve().ingest_all(overwrite=True)", space)
    assert space["weights"].tolist() == [[1, 2], [3, 4]]
    assert space["print"] == 1


def test_ingest_all_skips_statistics(server):
    tracked = msgspec.structs.replace(
        record(30, "fc1", None), kind=Kind.ACTIVATION, stats=tap.viz.summarize(np.ones(3))
    )
    server.history.write([tracked, record(31, "nothing", None)])
    space = {"__name__": "notebook"}
    exec("import tensortap as tap; found = tap.serve().ingest_all()", space)
    assert space["found"] == {"nothing": "nothing"}
    assert space["nothing"] is None
    assert "fc1" not in space


def test_ingest_all_skips_values_that_cannot_be_rebuilt(server, capsys):
    server.history.write(
        [
            record(0, "bad", Mapping(((Items("list", ()), 1),))),
            record(1, "worse", Number("zero")),
            record(2, "good", 5),
        ]
    )
    space = {}
    exec("import tensortap as tap; tap.serve().ingest_all()", space)
    assert space["good"] == 5
    assert "bad" not in space
    said = capsys.readouterr().out
    assert "no bad: " in said
    assert "no worse: " in said


def test_get(server):
    server.history.write(RECORDS)
    assert tap.get("loss") == 1.0
    assert tap.get("loss", 1) == 1.25
    assert tap.get("loss", step=10, rank=0) == 1.5
    assert tap.get_all("loss") == [1.5, 1.25, 1.0]
    assert {r: v.tolist() for r, v in tap.get("grads", rank="all").items()} == {0: [1], 1: [2]}
    assert tap.get("both", kind=Kind.GRADIENT) == 2
    with pytest.raises(NotFound, match="rank must be a number, 'all' or 'whole', got 'first'"):
        tap.get("loss", rank="first")


def test_verbs_without_a_session(monkeypatch):
    monkeypatch.setattr(live, "_session", None)
    for verb in (tap.summary, tap.status, lambda: tap.get("x")):
        with pytest.raises(NotFound, match=r"call tap\.serve\(\) first"):
            verb()


def test_summary_and_describe_and_help(server, capsys):
    tap.summary()
    assert 'nothing caught yet: add tap.catch(value, "name")' in capsys.readouterr().out
    server.history.write(RECORDS)
    tap.summary()
    seen = capsys.readouterr().out
    for one in RECORDS:
        assert one.name in seen
    live.current().describe("weights")
    seen = capsys.readouterr().out
    assert "weights" in seen
    assert "[2, 2] f32 x∈[1" in seen
    live.current().describe("loss", 1)
    assert "3 records, steps 10 to 40" in capsys.readouterr().out
    tap.help()
    assert "session.ingest_all()" in capsys.readouterr().out


@pytest.mark.slow
def test_status_returns(server, capsys):
    server.history.write(RECORDS)
    tap.status(0.3)
    seen = capsys.readouterr().out
    assert "12 records" in seen
    assert [one.name for one in RECORDS if one.name not in seen] == []
    assert server.alive


def test_serve(monkeypatch, capsys):
    monkeypatch.setattr(live, "_session", None)
    first = tap.serve(port=0, memory="32MB")
    assert "listening on 127.0.0.1:" in capsys.readouterr().out
    assert first.server.history.bound == 32 << 20
    assert tap.serve() is first
    assert "already listening" in capsys.readouterr().out
    with pytest.raises(TensortapError, match=rf"port {first.address.port} is in use"):
        live.start("127.0.0.1", first.address.port)
    live.current().close()
    assert not first.alive


@pytest.mark.parametrize(
    ("host", "where"),
    [("localhost", "127.0.0.1"), ("127.0.0.1:0", "127.0.0.1"), ("::1", "::1"), ("[::1]:0", "::1")],
)
def test_host_with_and_without_a_port(host, where):
    server = live.start(host, 0, "1MB")
    assert server.address.host == where
    assert server.address.port > 0
    server.close()


def test_alert_does_not_hide_its_value(server, capsys):
    alert = Mapping((("rule", "nan"), ("message", "2 NaN of 4"), ("kind", "Value")))
    server.history.write(
        [record(0, "loss", 1.5), record(1, "loss", alert, kind=Kind.ALERT, step=0)]
    )
    tap.summary()
    printed = " ".join(capsys.readouterr().out.split())
    assert "loss step 0 2 NaN of 4" in printed  # among the alerts
    assert "loss 0 1.5" in printed
    assert tap.get("loss") == 1.5
    assert tap.get_all("loss") == [1.5]
    assert tap.get("loss", kind="Alert")["rule"] == "nan"
    assert live.current().ingest_all(overwrite=True) == {"loss": "loss"}


def test_malformed_alerts_can_be_shown(server, capsys):
    tensor = RECORDS[1].value
    strange = [
        "text", None, tensor, Mapping(()), Mapping(((tensor, 1), (1, 2))),
        Mapping((("kind", Items("list", ())), ("message", tensor), ("facts", Items("set", (1,))))),
        Mapping((("facts", Mapping(((tensor, 1), ("x", "y")))), ("again", "often"))),
        Mapping((("message", "\x1b[2J"), ("kind", "Nothing"))),
    ]  # fmt: skip
    for i, value in enumerate(strange):
        server.history.write([record(i, f"n{i}", value, kind=Kind.ALERT)])
    tap.summary()
    live.current().describe("n7")
    assert "\x1b[2J" not in capsys.readouterr().out
