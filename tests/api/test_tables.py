"""Tables of a live session."""

from __future__ import annotations

import io
import math
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tensortap.api import tables
from tensortap.core.files import plain
from tensortap.live import answers
from tensortap.live.answers import ClientRow, NameRow, Overview
from tensortap.stats import summarize_array
from tests.runs.readers.contract import record


def client(**fields) -> ClientRow:
    plain = ClientRow(
        program="train.py", host="gpu7", pid=77, rank=0, world_size=1, connected=True, path="TCP",
        records=10, nbytes=1000, dropped=0, reasons={},
    )  # fmt: skip
    return msgspec.structs.replace(plain, **fields)


def row(name="loss", line="0.5", **fields) -> NameRow:
    head = msgspec.structs.replace(record(1, name, None), time_ns=time.time_ns())
    return NameRow(**{"head": head, "records": 3, "evicted": 0, "line": line, **fields})


def overview(**fields) -> Overview:
    plain = Overview(
        address="127.0.0.1:2875", pid=1, started=0.0, written=10, written_nbytes=2048, nbytes=1024,
        bound=4096, evicted=0, rejected={}, clients=(client(),), names=(row(),), recent=(row(),),
    )  # fmt: skip
    return msgspec.structs.replace(plain, **fields)


def printed(view: Overview, width=200) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=width)
    console.print(tables.summary(view))
    return out.getvalue()


def test_summary():
    text = printed(overview())
    for words in ("tensortap on 127.0.0.1:2875", "1 program, 1 connected", "10 records, 2.0 KiB",
                  "1.0 KiB of at most 4.0 KiB", "train.py on gpu7: connected over TCP",
                  "loss", "0.5", "now"):  # fmt: skip
        assert words in text
    assert "rejected" not in text


def test_shows_dropped_and_evicted_records():
    reasons = {"over budget": 1234, "disconnected": 6}
    away = client(connected=False, dropped=1240, reasons=reasons, rank=1, world_size=4)
    text = printed(overview(clients=(away,), evicted=42, rejected={"wrong key": 3, "error": 1}))
    assert "train.py on gpu7 rank 1 of 4: disconnected, 10 records" in text
    assert "dropped 1,240 (1,234 over budget, 6 disconnected)" in text
    assert "42 older records evicted" in text
    assert "wrong key: 3, error: 1" in text
    assert "3 (+9 evicted)" in printed(overview(names=(row(evicted=9),)))


def test_trends_and_alerts():
    alert = row("fc", "3 NaN of 12, the first of the step")
    trend = (1.0, 0.5, float("nan"), 0.0)
    text = printed(overview(names=(row(trend=trend), row("b")), alerts=(alert,)))
    assert "█▅!▁" in text
    assert "fc step 1 3 NaN of 12, the first of the step" in " ".join(text.split())
    plain = printed(overview())
    for word in ("trend", "alerts"):
        assert word not in plain


def test_trends_have_one_number_of_a_record():
    def of(*elements):
        stats = summarize_array(np.array(elements, "f4"))
        return answers.number_of(msgspec.structs.replace(record(0, "x", None), stats=stats))

    assert answers.number_of(record(0, "x", 7)) == 7.0
    assert answers.number_of(record(0, "x", "words")) is None
    assert of(3.0, -4.0) == math.sqrt(12.5)
    assert of(-2.0) == -2.0
    assert math.isnan(of(1.0, np.nan))
    assert math.isnan(of(np.inf))
    assert of() is None


def test_narrow_terminal_shows_values_and_evicted_counts():
    rows = row(trend=(0.0,) * 15 + (1.0,)), row("b", evicted=9)
    text = printed(overview(names=rows), width=80)
    assert "▁▁▁▁▁▁▁█" in text
    assert "▁▁▁▁▁▁▁▁█" not in text
    assert "(+9 evicted)" in " ".join(text.split())
    assert "records  " not in printed(overview(names=rows[:1]), width=80).split("name", 1)[1]


def test_truncates_many_clients_and_names():
    text = printed(
        overview(clients=(client(),) * 50, names=tuple(row(f"n{i}") for i in range(300)))
    )
    assert "… 30 more programs" in text
    assert "… 100 more" in text


HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\x00\x9b1m\u202e[red]x[/] [/] [link=x]:smile:"


@pytest.mark.attack("control characters for the terminal")
def test_sanitizes_hostile_names():
    bad = row(HOSTILE, HOSTILE)
    view = overview(
        alerts=(bad,),
        names=(bad,),
        recent=(bad,),
        clients=(client(program=HOSTILE, host=HOSTILE),),
        rejected={HOSTILE: 1},
    )
    text = printed(view)
    for evil in ("\x1b[2J", "\x1b]", "\x07", "\x00", "\x9b", "\u202e", "\r"):
        assert evil not in text
    assert text.count("[red]x[/] [/] [link=x]:smile:") >= 6


@given(st.text(max_size=50))
def test_plain_text_is_printable(text):
    assert plain(text).isprintable()
    if text.isprintable():
        assert plain(text) == text


def test_truncates_long_text():
    assert len(plain("x" * 1_000_000)) == 501


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "now"), (5, "5 s ago"), (120, "2 min ago"), (7200, "2 h ago"), (200_000, "2 d ago"),
     (-100, "now")],
)  # fmt: skip
def test_ago(seconds, words, monkeypatch):
    monkeypatch.setattr(tables, "time", SimpleNamespace(time=lambda: 1e9))
    assert tables.ago(10**18 - seconds * 10**9) == words


def test_rates(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tables, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rates = tables.Rates()
    rates.update(overview(written=0, written_nbytes=0))
    assert str(rates) == "0 records/s, 0 B/s"
    now[0] += 2
    rates.update(overview(written=5000, written_nbytes=4 << 20))
    assert str(rates) == "2,500 records/s, 2.0 MiB/s"
