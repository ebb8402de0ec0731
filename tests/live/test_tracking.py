"""A model that is tracked in one program, looked at in another."""

TRAINS = """
    import json, sys, torch, tensortap as tap
    from torch import nn
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    tap.catch(0, "hello").wait(60)
    with tap.track(model, tensors="^0$") as tracker:
        for n in range(20):
            model(torch.full((5, 4), 1.0 + n)).sum().backward()
            tracker.step(loss=float(n))
            if n == 10:
                assert tap.flush(60)
                print("ready")
                sys.stdin.readline()
    records = list(tracker.records)
    whole = [r for r in records if r.value is not None and r.kind == "Activation"]
    print(json.dumps([
        tracker.evicted, len(records), len(tracker.logframe()), len(whole),
        tracker.metrics()["loss"].tolist(), [r.seq for r in records]]))
"""


def test_a_tracker_keeps_its_records_although_a_session_takes_them(run, serving):
    """The session may be of another job, and ends while this one trains."""
    where = serving()
    program = run(TRAINS, to=where.address)
    assert program.line() == "ready"
    sent = where.written() - 1
    where.kill()
    program.say()
    evicted, records, rows, whole, losses, order = program.result()
    assert evicted == 0
    assert records == rows + 20
    assert (sent, records) == (2 + 11 * 11, 2 + 11 * 20)  # weights and 11 records per step
    assert whole == 20
    assert losses == [float(n) for n in range(20)]
    assert order == sorted(order)
