"""The verbs of a live session."""

from __future__ import annotations

import pytest

import tensortap as tap
from tensortap.api import session as live
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Items, Kind, Mapping
from tests.runs.readers.contract import RECORDS, record


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
    assert 'session.describe("loss")' in capsys.readouterr().out


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
