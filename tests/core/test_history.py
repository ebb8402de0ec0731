"""The bounded history: what it evicts, what it keeps, and its counts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensortap.core.columns import Column, split
from tensortap.core.history import OVERHEAD, History, payload_nbytes, record_nbytes
from tensortap.core.record import (
    Blob,
    Fields,
    Items,
    Kind,
    Mapping,
    Number,
    Opaque,
    Record,
    TensorData,
)

KIB = 1 << 10


def record(name="x", nbytes=0, *, number=0, rank=0, kind=Kind.VALUE, value=None):
    if value is None:
        value = TensorData("numpy", "uint8", (nbytes,), bytes(nbytes))
    return Record(name, kind, number, 0, number, rank, 1, number, value=value)


orders = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 6 * KIB), st.integers(0, 1)),
    min_size=1,
    max_size=60,
)


@pytest.mark.slow
@given(orders, st.integers(8 * KIB, 40 * KIB), st.integers(1, 5))
@settings(max_examples=100)
def test_evicts_the_oldest_of_the_longest_series(order, bound, together):
    """Compare with a simple model that searches everything each time."""
    history = History(bound)
    written = [record(n, size, number=i, rank=r) for i, (n, size, r) in enumerate(order)]
    model: dict[tuple, list[Record]] = {}
    evicted = 0
    for one in written:
        model.setdefault((one.name, one.kind, one.rank), []).append(one)
        held = lambda: sum(record_nbytes(r) for series in model.values() for r in series)
        if held() > bound:
            goal = bound - bound // 64
            while held() > goal:
                others = [t for t in model.values() if t and t[0] is not one]
                if not others:
                    break
                # the longest; of equals the one whose oldest is the oldest
                max(others, key=lambda t: (len(t), -t[0].time_ns)).pop(0)
                evicted += 1
            if held() > bound:
                model[one.name, one.kind, one.rank].remove(one)
                evicted += 1
    for i in range(0, len(written), together):
        history.write(written[i : i + together])
        assert history.nbytes <= bound
    expected = {key: series for key, series in model.items() if series}
    found = {(r.name, r.kind, r.rank): n for n, r in history.latest()}
    assert found == {key: len(series) for key, series in expected.items()}
    for name in "abcd":
        kept = [r for key, series in expected.items() if key[0] == name for r in series]
        assert history.records(name) == sorted(kept, key=lambda r: r.time_ns)
    assert sum(history.evicted.values()) == evicted
    assert history.written == len(written) == evicted + sum(len(t) for t in expected.values())
    assert history.nbytes == sum(record_nbytes(r) for t in expected.values() for r in t)


def as_columns(records):
    """Return a block of records as a server decodes it."""
    keys = sorted({(r.name, r.rank) for r in records})
    columns = [Column(n, Kind.VALUE, r, 1, "", "int", "", ()) for n, r in keys]
    rows = [(keys.index((r.name, r.rank)), r.step, r.call, r.seq, r.time_ns) for r in records]
    values = [r.value for key in keys for r in records if (r.name, r.rank) == key]
    body = np.array(rows, "<i8").tobytes() + np.array(values, "<i8").tobytes()
    return split(columns, [8] * len(columns), len(records), body)


def views(history):
    """Return everything that can be read from a history."""
    names = history.names()
    found = [
        history.records(n, **w)
        for n in names
        for w in ({}, {"step": 3}, {"seq": 5}, {"rank": 1}, {"last": 2})
    ]
    ends = [history.since(start, limit) for start in (0, 3, 90) for limit in (1, 7, 1000)]
    return (
        sorted(names),
        found and sorted(map(str, found)),
        ends,
        sorted(map(str, history.tails(20))),
        history.recent(9),
    )


@pytest.mark.parametrize("few", [0, 4])
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), max_size=40), max_size=5
    )
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_columns_read_as_records(monkeypatch, few, blocks):
    monkeypatch.setattr("tensortap.core.history._FEW", few)
    plain, history, number = History(1 << 20), History(1 << 20), 0
    for i, block in enumerate(blocks):
        records = [
            record(name, number=number + j, rank=rank, value=number + j)
            for j, (name, rank) in enumerate(block)
        ]
        number += len(block)
        plain.write(records)
        if i % 3 == 2:  # both in one series
            history.write(records)
        else:
            history.write_columns(as_columns(records))
    assert views(history) == views(plain)
    assert (history.written, history.written_nbytes) == (plain.written, plain.written_nbytes)


@given(
    st.lists(st.lists(st.sampled_from("aaabc"), min_size=1, max_size=90), min_size=1, max_size=8),
    st.integers(4 * KIB, 20 * KIB),
)
@settings(max_examples=60)
def test_evicts_the_oldest_of_columns(blocks, bound):
    history, written = History(bound), {}
    for block in blocks:
        number = sum(map(len, written.values()))
        records = [record(n, number=number + j, value=number + j) for j, n in enumerate(block)]
        for one in records:
            written.setdefault(one.name, []).append(one)
        history.write_columns(as_columns(records))
        assert history.nbytes <= bound
        held = 0
        for name, series in written.items():
            left = history.records(name)
            assert left == series[len(series) - len(left) :]
            assert len(left) + history.evicted[name] == len(series)
            held += len(left)
        _, since = history.since(0)
        assert [r.seq for r in since] == sorted(r.seq for r in since)
        assert len(since) == held
    parts = [part for series in history._series.values() for part in series.parts]
    single = sum(record_nbytes(part) for part in parts if isinstance(part, Record))
    columns = [len(part) * (8 + 48) + 1025 for part in parts if not isinstance(part, Record)]
    assert history.nbytes == single + sum(columns)


@pytest.mark.parametrize("share", [0.97, 0.985, 0.99, 0.999])
def test_keeps_a_value_nearly_as_large_as_the_bound(share):
    history = History(1 << 20)
    history.write([record("small", 100, number=i) for i in range(10)])
    history.write([record("large", int(share * (1 << 20)) - OVERHEAD - 5, number=10)])
    assert [r.seq for r in history.records("large")] == [10]
    assert history.nbytes <= history.bound


def test_evicts_a_value_larger_than_the_bound():
    history = History(10_000)
    history.write([record("large", 20_000)])
    assert history.names() == []
    assert (history.nbytes, history.evicted["large"], history.written) == (0, 1, 1)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (None, 0), (1.5, 0), (7, 0), ("abc", 3), ("äbc", 12), (Blob("bytes", b"12345"), 5),
        (Number("int", text="0xfff"), 5), (Opaque("t", "repr"), 4),
        (TensorData("numpy", "uint8", (4,), b"1234"), 4),
        (Items("list", (Blob("bytes", b"12345"), "abc")), 64 + 5 + 64 + 3),
        (Mapping((("ab", "c"),)), 128 + 2 + 1),
        (Fields("dataclass", "m:C", ("a",), ("xyz",)), 64 + 3),
    ],
)  # fmt: skip
def test_payload_nbytes(value, nbytes):
    assert payload_nbytes(value) == nbytes


def test_strings_names_and_tags_count_towards_the_bound():
    history = History(100 * KIB)
    history.write([record("v", value="x" * KIB, number=i) for i in range(1000)])
    assert len(history.records("v")) * KIB <= 100 * KIB
    assert history.evicted["v"] == 1000 - len(history.records("v"))
    plain = record("n")
    assert record_nbytes(record("n" * 1001)) == record_nbytes(plain) + 1000
    tagged = Record("n", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=plain.value, tags={"k": "v" * 1000})
    assert record_nbytes(tagged) > record_nbytes(plain) + 1000


def test_one_series_per_name_kind_and_rank():
    history = History(1 << 20)
    history.write([record("a", number=0), record("a", number=1, rank=1)])
    history.write([record("a", number=2, kind=Kind.GRADIENT), record("b", number=3)])
    assert history.names() == ["a", "b"]
    assert [(n, r.rank, r.kind) for n, r in history.latest()] == [
        (1, 0, Kind.VALUE),
        (1, 1, Kind.VALUE),
        (1, 0, Kind.GRADIENT),
        (1, 0, Kind.VALUE),
    ]
    assert [r.seq for r in history.records("a")] == [0, 1, 2]
    assert history.records("nothing") == []


@pytest.mark.parametrize("late", [False, True])
def test_last_limits_the_records_of_each_rank(late):
    history = History(1 << 20)
    records = [record("x", rank=n % 3, number=n) for n in range(30)]
    history.write(records[1:] + records[:1] if late else records)
    for rank in (None, 1):
        everything = history.records("x", rank=rank)
        found = history.records("x", rank=rank, last=2)
        assert found[-2:] == everything[-2:]
        assert {r.rank for r in found} == {r.rank for r in everything}
        assert late or len(found) == 2 * len({r.rank for r in everything})
    assert [r.step for r in history.records("x", step=4, last=1)] == [4]


def test_wait():
    history = History(1 << 20)
    assert history.wait(0, 0)
    assert not history.wait(1, 0.01)
    threading.Timer(0.05, lambda: history.write([record()])).start()
    assert history.wait(1, 60)


@pytest.mark.slow
def test_concurrent_reads_and_writes():
    history = History(200 * KIB)
    wrong, done, rounds = [], threading.Event(), [0, 0, 0]

    def read(reader):
        while not done.is_set():
            for _, newest in history.latest():
                held = history.records(newest.name)
                if [r.seq for r in held] != sorted(r.seq for r in held):
                    wrong.append(held)
            history.recent(5)
            rounds[reader] += 1

    readers = [threading.Thread(target=read, args=(n,)) for n in range(3)]
    for thread in readers:
        thread.start()
    number = 0
    while number < 5000 or min(rounds) < 20:
        history.write(
            [record("abcdef"[(number + i) % 6], 3000, number=number + i) for i in range(9)]
        )
        number += 9
    done.set()
    for thread in readers:
        thread.join()
    assert not wrong


def test_since_in_pieces_and_with_evictions():
    records = [record(f"name{n % 7}", number=n) for n in range(300)]
    history = History(1 << 30)
    history.write(records[:200])
    cursor, first = history.since(0)
    assert (cursor, first) == (200, records[:200])
    assert history.since(cursor) == (200, [])
    history.write(records[200:])
    found, cursor = [], 0
    while True:
        before = cursor
        cursor, some = history.since(cursor, limit=13)
        assert len(some) <= 13
        found += some
        if cursor == before:
            break
    assert found == records
    small = History(50 * 600)
    for each in records:
        small.write([each])
    held = [r for name in small.names() for r in small.records(name)]
    cursor, left = small.since(0)
    assert cursor == 300
    assert left == sorted(held, key=lambda r: r.seq)


def test_records_that_arrive_late_are_in_order_of_time():
    history = History(1 << 20)
    order = [0, 1, 4, 5, 2, 3]
    history.write([Record("x", Kind.VALUE, n, 0, n, 0, 1, 10 + n) for n in order])
    assert [r.step for r in history.records("x")] == [0, 1, 2, 3, 4, 5]
    cursor, came = history.since(2)
    assert (cursor, [r.step for r in came]) == (6, [4, 5, 2, 3])  # in order of arrival
