"""A model that is tracked in one program, looked at in another."""

from tensortap.core.record import Kind
from tensortap.text.records import record_details, record_line


def test_the_live_session_shows_statistics(run, server):
    program = run(
        """
        import torch, tensortap as tap
        from torch import nn
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        tap.catch(0, "hello").wait(60)
        with tap.track(model, tensors="weight", alerts=True) as tracker:
            for n in range(3):
                x = torch.full((5, 4), float("nan") if n == 2 else 1.0)
                model(x).sum().backward()
                tracker.step(loss=float(n))
        tap.flush(60)
        """
    )
    program.end()
    history = server.history
    names = set(history.names())
    assert {"0", "1", "Sequential", "0.weight", "0.bias", "loss"} <= names
    records = history.records("0")
    assert [r.step for r in records if r.kind is Kind.ACTIVATION] == [0, 1, 2]
    assert all(r.stats is not None for r in records if r.kind is not Kind.ALERT)
    assert [r.step for r in records if r.kind is Kind.ALERT] == [2]
    line = record_line(next(r for r in records if r.kind is Kind.ACTIVATION))
    assert line.startswith("[5, 8] f32 x∈[")
    assert "None" not in "".join(record_line(r) + record_details(r) for r in records)


def test_a_tracker_reads_back_what_the_session_has_and_keeps_nothing(run, server):
    program = run(
        """
        import json, torch, tensortap as tap
        from torch import nn
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        tap.catch(0, "hello").wait(60)
        with tap.track(model, tensors="^0$") as tracker:
            for n in range(20):
                model(torch.full((5, 4), 1.0 + n)).sum().backward()
                tracker.step(loss=float(n))
        records = list(tracker.records)
        whole = [r for r in records if r.value is not None and r.kind == "Activation"]
        frame = tracker.logframe()
        print(json.dumps([
            len(tracker._observer._records.memory.records), tracker.evicted, len(records),
            len(frame), len(whole), tracker.metrics()["loss"].tolist(), [r.seq for r in records]]))
        """
    )
    kept, evicted, records, rows, whole, losses, order = program.result()
    assert (kept, evicted) == (0, 0)
    assert records == rows + 20 == server.history.written - 1
    assert whole == 20
    assert losses == [float(n) for n in range(20)]
    assert order == sorted(order)
