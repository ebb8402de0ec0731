"""The table, over every kind of origin."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import tensortap as tap
import tensortap.table.table as table_module
from tensortap.alerts import Alert
from tensortap.alerts.alert import record_of
from tensortap.api import session as live
from tensortap.core.errors import NotFound
from tensortap.core.history import History
from tensortap.core.record import Kind
from tensortap.rooms.figures.figures.exponents import _without_recomputed, outside_range
from tensortap.table.columns import exponents
from tensortap.table.sources import RunSource
from tensortap.table.table import Table, table_of
from tests.figures.conftest import LAYERS, STEPS, RunWriter, training


def checked(table, records):
    """Assert that a table has the statistics of the records."""
    wanted = {
        (r.name, r.kind.value, r.step, r.rank, r.seq): r
        for r in records
        if r.kind not in (Kind.ALERT, Kind.METRIC)
    }
    seen = 0
    for kind in ("Activation", "Gradient"):
        for name in LAYERS:
            rows = table.series(kind, name)
            assert (np.diff(table.step[rows]) >= 0).all()
            for row in rows.tolist():
                key = (name, kind, int(table.step[row]), int(table.rank[row]))
                record = next(r for k, r in wanted.items() if k[:4] == key)
                for statistic in ("rm2", "max_abs", "min", "zeros", "nans"):
                    expected = getattr(record.stats, statistic)
                    np.testing.assert_equal(table.column(statistic)[row], expected)
                found = exponents(table, np.array([row]))
                bins = {found.low + i: n for i, n in enumerate(found.counts[:, 0].tolist()) if n}
                assert bins == record.stats.exponents
                assert table.dtypes[table.dtype[row]] == "float32"
                seen += 1
    assert seen == len(wanted)
    assert table.layers("Activation") == LAYERS
    assert table.tensor_kinds() == ["Activation", "Gradient"]


class TableContract:
    """Every kind of origin gives the same table; subclasses provide it as `made`."""

    ranks = 1

    @pytest.fixture
    def made(self):
        raise NotImplementedError

    def test_has_the_statistics_of_the_records(self, made):
        checked(made, training(ranks=self.ranks))

    def test_metrics(self, made):
        for rank in range(self.ranks):
            steps, values = made.metrics(rank)["loss"]
            assert steps.tolist() == list(range(STEPS))
            assert values.tolist() == [1.0 / (1 + s) + rank for s in range(STEPS)]

    def test_alerts(self, made):
        assert [(a.name, a.step, a.message) for a in made.alerts()] == [
            (LAYERS[2], 7, "3 NaN")
        ] * self.ranks

    def test_counts_nonfinite_values(self, made):
        rows = made.rows(kind="Activation", names=[LAYERS[2]], rank=0, step=7)
        assert made.nonfinite(rows).tolist() == [3]
        assert made.column("nonfinite")[rows].tolist() == [3.0]

    def test_refresh_without_new_records(self, made):
        version = made.version
        assert not made.refresh()
        assert made.version == version


class TestFinishedRun(TableContract):
    @pytest.fixture
    def made(self, run_path):
        return table_of(run_path)


class TestRunOfTwoRanks(TableContract):
    ranks = 2

    @pytest.fixture
    def made(self, tmp_path):
        writer = RunWriter(tmp_path, 2)
        writer.write(training(ranks=2))
        writer.close()
        return table_of(tap.open(writer.path))


class TestGrowingRun(TableContract):
    """Rows come in several batches, and columns are read in between."""

    @pytest.fixture
    def made(self, writer):
        writer.write(training(range(5)))
        table = table_of(writer.path)
        assert table.column("rm2").shape == (len(table),)
        records = training()[len(training(range(5))) :]
        writer.write(records[:20])
        assert table.refresh()
        table.column("max_abs")
        writer.write(records[20:])
        writer.close()
        assert table.refresh()
        return table


class TestHistory(TableContract):
    @pytest.fixture
    def made(self):
        history = History(1 << 30)
        records = training()
        history.write(records[:30])
        table = table_of(history)
        table.column("rm2")
        history.write(records[30:])
        assert table.refresh()
        return table


class TestSessionOfAnotherProcess(TableContract):
    @pytest.fixture
    def made(self):
        server = live.start("127.0.0.1", 0)
        server.history.write(training())
        with tap.open(str(server.address)) as view:
            yield table_of(view)
        server.close()


class TestRecords(TableContract):
    @pytest.fixture
    def made(self):
        return table_of(training())


def test_logframe(run_path):
    frame = tap.open(run_path).logframe()
    table = table_of(frame)
    checked(table, training())
    assert table.metrics() == {}
    assert not table.refresh()


def test_reports_values_outside_the_range_of_a_logframe(run_path):
    from tensortap.rooms.figures.figures.exponents import exponents_figure

    narrow = table_of(tap.open(run_path).logframe(exponents=(-3, 2)))
    whole = table_of(run_path)
    for layer, step in (("embed", 11), ("output", 0), ("output", 8)):
        rows = narrow.rows(kind="Activation", names=[layer], step=step)
        below, above = outside_range(narrow, rows)
        counts = exponents(whole, whole.rows(kind="Activation", names=[layer], step=step)).counts
        assert exponents(narrow, rows).counts.sum() + below + above == counts.sum()
        figure = exponents_figure(narrow, name=layer, kind="Activation", step=step)
        note = figure["layout"]["annotations"][1]["text"]
        assert ("below the counted range" in note) == bool(below[0])
        assert ("above the counted range" in note) == bool(above[0])


def test_metrics_of_several_ranks_are_averaged():
    records = training(range(3), ranks=2)
    again = msgspec.structs.replace(records[-1], value=5.0, seq=900)  # the later one counts
    steps, values = table_of([*records, again]).metrics()["loss"]
    assert steps.tolist() == [0, 1, 2]
    assert values.tolist() == [1.5, 1.0, (1 / 3 + 5.0) / 2]


def test_reads_only_the_columns_that_are_needed(run_path, monkeypatch):
    calls = []
    read = RunSource.read_part

    def noted(self, rank, part, columns):
        calls.append(columns)
        return read(self, rank, part, columns)

    monkeypatch.setattr(RunSource, "read_part", noted)
    table = table_of(run_path)
    table.column("rm2")
    table.column("rm2")
    table.refresh()
    index, *more = calls
    assert set(index) == {"name", "kind", "dtype", "step", "rank", "call", "seq"}
    assert more == [["rm2"]]


def test_dropped_records_are_no_rows(writer):
    records = training(range(2))
    writer.write(records)
    writer.stores[0].note_dropped("embed", Kind.ACTIVATION, 1, 0)
    writer.write([msgspec.structs.replace(records[0], step=5, seq=900)])
    writer.close()
    table = table_of(writer.path)
    assert len(tap.open(writer.path).missing()) == 1
    assert table.step[table.series("Activation", "embed")].tolist() == [0, 1, 5]
    assert not np.isnan(table.column("rm2")[table.series("Activation", "embed")]).any()


def test_leaves_out_recomputed_rows(writer):
    records = training(range(1))
    again = msgspec.structs.replace(records[0], call=1, seq=500, tags={"recompute": "1"})
    writer.write([*records, again])
    for source in (writer.path, [*records, again]):
        table = table_of(source)
        rows = table.series("Activation", "embed")
        assert len(rows) == 2
        assert table.call[_without_recomputed(table, rows)].tolist() == [0]


def test_keeps_rows_that_a_history_evicted():
    records = training()
    history = History(40 * 700)
    table = table_of(history)
    for record in records:
        history.write([record])
        table.refresh()
    assert sum(history.evicted.values())
    checked(table, records)


def test_empty_run(writer):
    table = table_of(writer.path)
    assert len(table) == 0
    assert (table.tensor_kinds(), table.layers(), table.alerts()) == ([], [], [])
    assert table.column("rm2").shape == (0,)
    assert exponents(table, np.empty(0, np.int64)).counts.shape[1] == 0


def test_table_of_a_table_is_the_same_object(table):
    assert table_of(table) is table
    assert isinstance(table, Table)


@pytest.mark.parametrize("source", [3, "no/such/folder", object()])
def test_rejects_other_objects(source):
    with pytest.raises((TypeError, tap.TensortapError)):
        table_of(source)


def test_unknown_statistic(table):
    with pytest.raises(NotFound, match="no statistic is called 'rm3'; did you mean"):
        table.column("rm3")


def test_exponents_of_rows_in_any_order(table):
    rows = table.rows(kind="Gradient", names=["output", "embed"])[::-1]
    one = exponents(table, rows)
    for place in (0, 5, len(rows) - 1):
        alone = exponents(table, rows[place : place + 1])
        width = len(alone.counts)
        start = alone.low - one.low
        assert (one.counts[start : start + width, place] == alone.counts[:, 0]).all()
        assert one.counts[:, place].sum() == alone.counts.sum()
        assert one.max_abs[place] == alone.max_abs[0]


@pytest.mark.slow
def test_starts_over_when_a_bounded_source_has_evicted_many_rows(monkeypatch):
    monkeypatch.setattr(table_module, "_BOUNDED_ROWS", 200)
    history = History(40 * 700)
    table = table_of(history)
    table._limit = 200
    for step in range(200):
        history.write([msgspec.structs.replace(r, step=step) for r in training(range(1))])
        table.refresh()
    held = sum(len(history.records(name)) for name in history.names())
    assert held < 100
    assert len(table) <= 200 + 11
    assert table.step[table.series("Activation", "embed")][-1] == 199
    assert len(table.column("rm2")) == len(table)


def test_figures_hold_the_lock(table):
    from tensortap.rooms.figures.figures.lines import lines_figure

    held = []

    class Lock:
        def __enter__(self):
            held.append(True)

        def __exit__(self, *_):
            held.append(False)

    other = table_of(training(range(1)))
    other.lock = Lock()
    lines_figure(other, names=["embed"], kind="Activation", metrics=["rm2"])
    assert held[0] is True
    assert held[-1] is False


def test_very_many_alerts_are_bounded_and_counted():
    """A table of 2 MB may hold 200,000 alerts of any rank; the earliest ones are shown."""
    records = [
        record_of(Alert("nan", f"x{i}", Kind.WEIGHT, 20_000 - i, 0, "", "bad"), seq=i, time_ns=0)
        for i in range(10_050)
    ]
    table = table_of(records)
    *found, last = table.alerts()
    assert len(found) == 10_000
    assert [alert.step for alert in found] == sorted(20_000 - i for i in range(50, 10_050))
    assert str(last) == "step 20000, alerts (Value): 50 more alerts are not shown"
    assert table.alerts() == [*found, last]
    assert table.alerts("hint") == []
