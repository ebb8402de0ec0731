"""A session that is not there yet, goes away, and comes back: training goes on."""

from __future__ import annotations

import itertools
import json
import socket
import textwrap

import pytest

from tensortap.api import session as live
from tensortap.api.lookup import get as fetch
from tests.live.talking import TALKS, Talker, segments


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_finds_a_server_that_starts_later(run, wait_for, row):
    port = free_port()
    talk = Talker(run(TALKS, to=f"127.0.0.1:{port}"))
    talk("catch(100)")
    wait_for(lambda: talk("receipt()")["disconnected"] == 100, what=lambda: talk("receipt()"))
    before = talk("receipt()")
    assert (before["captured"], before["dropped"]) == (0, 100)
    assert "no key on this machine" in before["state"][0]  # the server will create it
    server = live.start("127.0.0.1", port, "64MB")
    try:
        wait_for(lambda: talk("receipt()")["state"][0].startswith("connected"))
        assert server.history.written == 0
        talk("catch(50)")
        assert talk("tap.flush(60)")
        after = talk("receipt()")
        assert (after["captured"], after["disconnected"]) == (50, 100)
        assert server.history.written == 50
        assert fetch(server.history, "x", -1).tolist() == [100]
        assert server.history.records("x")[0].step == 100
        assert row(server).dropped == 100
        assert row(server).records == 50
    finally:
        server.close()


def test_nothing_is_copied_and_no_thread_spins_without_a_server(run, wait_for):
    program = run(
        """
        import resource, time, numpy as np, tensortap as tap
        def usage():
            return resource.getrusage(resource.RUSAGE_SELF)
        x = np.zeros(25_000_000)
        tap.catch(x, "x")
        while tap.receipt().reasons["disconnected"] < 1:
            time.sleep(0.01)
        before, start = usage(), time.process_time()
        for _ in range(1000):
            tap.catch(x, "x")
        took = time.process_time() - start
        assert usage().ru_maxrss - before.ru_maxrss < 10_000
        start = time.process_time()
        x.copy()
        assert took < 20 * (time.process_time() - start)  # not a thousand times as long
        before, start = usage(), time.monotonic()
        time.sleep(1)
        slept, after = time.monotonic() - start, usage()
        # a thread that polls gives up the processor again and again, and one that spins uses it
        assert after.ru_nvcsw - before.ru_nvcsw < 200 * slept
        assert after.ru_utime - before.ru_utime < slept / 2
        """,
        to=f"127.0.0.1:{free_port()}",
    )
    program.end()


@pytest.mark.parametrize(("arena", "size"), [("", 100_000), ("1", 1)], ids=["shared memory", "TCP"])
@pytest.mark.fault("kill -9 of a session")
def test_server_killed_and_restarted_between_records(serving, run, wait_for, row, arena, size):
    first = serving()
    stream = run(
        f"""
        import json, sys, threading, time, numpy as np, tensortap as tap
        stop, killed = threading.Event(), threading.Event()
        def listen():
            sys.stdin.readline()
            killed.set()
            sys.stdin.readline()
            stop.set()
        threading.Thread(target=listen, daemon=True).start()
        i = 0
        print("ready")
        while not stop.is_set():
            tap.catch(np.full({size}, i), "x")
            i += 1
            time.sleep(0.002)
            if killed.is_set() and tap.receipt().reasons["disconnected"] > 10:
                killed.clear()
                print("missed")
        flushed = tap.flush(60)
        r = tap.receipt()
        print(json.dumps([flushed, i, r.captured, r.dropped, r.skipped, r.reasons]))
        """,
        to=first.address,
        TENSORTAP_NO_ARENA=arena,
    )
    assert stream.line() == "ready"
    wait_for(lambda: first.written() > 50)
    first.kill()
    stream.say()
    assert stream.line() == "missed"
    second = serving(port=first.port)
    wait_for(lambda: second.written() > 50)
    stream.say()
    flushed, sent, captured, dropped, skipped, reasons = json.loads(stream.line())
    assert flushed
    assert reasons["disconnected"] == dropped > 10
    assert captured + dropped == sent
    assert skipped == 0
    stream.end()
    client = row(second)
    assert client.dropped == dropped
    assert client.records == second.written()
    # every value is in one of the two sessions or is counted as dropped
    steps = second.ask("[r.step for r in server.history.records('x')]")
    assert steps == sorted(steps)
    assert steps[-1] == sent - 1
    missing = steps[0] + sum(b - a - 1 for a, b in itertools.pairwise(steps))
    assert len(steps) + missing == sent
    held_by_first = sent - len(steps) - dropped
    assert 0 <= held_by_first <= steps[0]  # the first had the oldest, and nobody else
    content = second.ask("[int(x[-1]) for x in tap.get_all('x')]")
    assert content == steps


@pytest.mark.fault("kill -9 of a session")
def test_the_history_of_a_server_is_not_in_the_memory_of_its_client(serving, run, wait_for):
    where = serving(memory="512MB")
    talk = Talker(run(TALKS, to=where.address))
    talk("catch(40, size=1_000_000, wait=60)")  # 320 MB of int64, all held by the server
    private = 8_003_584  # of the first value, which did not wait for the connection
    taken = talk("pool.taken")
    assert (16 << 20) + private <= taken <= (32 << 20) + private
    assert segments(talk.program.pid) == 2  # the arena, and the segment with the nonce
    where.kill()
    wait_for(lambda: not talk("receipt()")["state"][0].startswith("connected"))
    assert talk("catch(5)") is None
    assert talk("pool.taken") <= (32 << 20) + private


@pytest.mark.fault("SIGSTOP of a session")
def test_flush_returns_false_without_a_server(serving, run, wait_for):
    where = serving()
    talk = Talker(run(TALKS, to=where.address))
    talk("catch(1, wait=60)")
    where.stop()
    talk("catch(200, size=1000)")
    where.kill()
    wait_for(lambda: not talk("receipt()")["state"][0].startswith("connected"))
    # the 200 are neither there nor given up
    assert talk("tap.flush(0.2)") is False
    again = serving(port=where.port)
    wait_for(lambda: talk("receipt()")["state"][0].startswith("connected"))
    assert talk("tap.flush(60)") is True
    assert again.written() >= 200
    r = talk("receipt()")
    assert (r["captured"], r["disconnected"], r["sent"]) == (201, 0, 201)


def test_a_session_takes_only_the_programs_that_it_accepts(run, tmp_path, caplog, wait_for):
    ours, theirs = tmp_path / "ours" / "train.py", tmp_path / "theirs" / "train.py"
    code = "import runpy, sys; sys.argv = [{0!r}]; sys.modules['__main__'].__file__ = {0!r}\n"
    server = live.start("127.0.0.1", 0, "64MB", accept="ours/*.py")
    try:
        us, them = (
            Talker(run(code.format(str(path)) + textwrap.dedent(TALKS), to=str(server.address)))
            for path in (ours, theirs)
        )
        us("catch(5, wait=60)")
        them("catch(5)")
        wait_for(lambda: them("receipt()")["disconnected"] == 5)
        said = f"none: it accepts only 'ours/*.py', and this is {theirs}"
        assert them("receipt()")["state"] == [said]
        assert server.rejected["not accepted"] > 0
        assert server.history.written == 5
        assert not caplog.records
        server.accept = None
        wait_for(lambda: them("receipt()")["state"][0].startswith("connected"))
        them("catch(5, wait=60)")
        assert server.history.written == 10
        assert f"{theirs} sends to this session as well as {ours}" in caplog.text
        assert "accept='train.py'" in caplog.text
    finally:
        server.close()
