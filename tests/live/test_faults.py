"""Slow and cut connections, and parties that stop: training goes on, and nothing is lost unseen."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from tensortap.api.lookup import get as fetch
from tests.live.server.clients import Proxy
from tests.live.talking import TALKS, Talker

pytestmark = pytest.mark.slow


class SlowProxy(Proxy):
    """A wire that lets through 4 KB at a time, and nothing while it is held."""

    def __init__(self, port):
        self.flows = threading.Event()
        self.flows.set()
        super().__init__(port)

    def _read(self, source):
        self.flows.wait()
        return source.recv(4096)


@pytest.mark.fault("slow connection")
def test_slow_connection_does_not_slow_training(server, run, record_property):
    proxy = SlowProxy(server.address.port)
    try:
        talk = Talker(run(TALKS, to=f"127.0.0.1:{proxy.port}", TENSORTAP_NO_ARENA="1"))
        talk("catch(1, wait=60)")
        proxy.flows.clear()
        talk("catch(199, size=5_000)")  # 8 MB: would not return if it waited for the connection
        # nor does it delay other programs
        run("""
            import numpy as np, tensortap as tap
            for i in range(20):
                assert tap.catch(np.full(20_000, i), "other").wait(60)
        """).end()
        assert len(server.history.records("other")) == 20
        assert len(server.history.records("x")) < 100
        proxy.flows.set()
        assert talk("tap.flush(60)")
        receipt = talk("receipt()")
        assert receipt["captured"] + receipt["dropped"] == 200
        check_history(server, receipt["captured"])
        record_property("tried", 200)
    finally:
        proxy.close()


@pytest.mark.fault("connection cut at random moments")
@pytest.mark.parametrize("arena", ["", "1"], ids=["shared memory", "TCP"])
def test_random_cuts(server, run, wait_for, arena, rounds):
    proxy = Proxy(server.address.port)
    moments = random.Random(0)
    try:
        talk = Talker(run(TALKS, to=f"127.0.0.1:{proxy.port}", TENSORTAP_NO_ARENA=arena))
        talk("catch(1, wait=60)")
        for _ in range(rounds(3, 40)):
            talk("catch(20, size=20_000)")
            time.sleep(moments.uniform(0.0, 0.05))
            proxy.cut()
            wait_for(lambda: sum(client.connected for client in server.clients.values()) == 1)
        wait_for(lambda: talk("catch(1, wait=5)") is None and talk("tap.flush(5)"))
        receipt = talk("receipt()")
        assert receipt["captured"] + receipt["dropped"] == receipt["sent"]
        assert receipt["dropped"] == receipt["disconnected"]
        check_history(server, receipt["captured"])
    finally:
        proxy.close()


def check_history(server, captured):
    """Check that a session holds what was captured, once and with its values."""
    steps = [record.step for record in server.history.records("x")]
    assert len(steps) == captured
    assert steps == sorted(set(steps))
    assert [int(fetch(server.history, "x", step=step)[-1]) for step in steps] == steps


# catches small and large values for each line of its input, and says how long one took at most
STEADY = """
    import json, sys, time, numpy as np, tensortap as tap
    assert tap.catch(0.0, "first").wait(60)
    values = [np.ones(size) for size in (1, 1000, 100_000)]
    count = 1
    print("ready")
    for line in iter(sys.stdin.readline, "end\\n"):
        longest = 0.0
        for _ in range(400):
            for value in values:
                start = time.perf_counter()
                tap.catch(value, f"{value.size}")
                longest = max(longest, time.perf_counter() - start)
                count += 1
            time.sleep(0.001)
        print(longest)
    assert tap.flush(60)
    receipt = tap.receipt()
    print(json.dumps([count, receipt.captured, receipt.dropped]))
"""


@pytest.mark.fault("SIGSTOP of a session")
def test_a_stopped_session_never_blocks_training(serving, run, record_property):
    where = serving(memory="64MB")
    program = run(STEADY, to=where.address, TENSORTAP_BUFFER="16MB")  # full after a moment
    assert program.line() == "ready"
    longest = []

    def catches_while_it_is_stopped():
        where.stop()
        program.say()
        longest.append(float(program.line()))
        where.go_on()
        return longest[-1]

    # several times: on a busy machine a catch may take long without waiting for the session
    assert any(catches_while_it_is_stopped() < 0.5 for _ in range(5))
    program.say("end")
    count, captured, dropped = program.result()
    record_property("longest catch", min(longest))
    assert captured + dropped == count
    assert dropped > 0
    assert where.written() == captured


VIEWER = """
    import tensortap as tap
    view = tap.open({address!r})
    print("ready")
    while True:
        view.overview()
        print("seen")
"""


@pytest.mark.fault("SIGSTOP of a viewer")
def test_stopped_viewers_do_not_delay_others(server, run, programs):
    viewers = [programs(VIEWER.format(address=str(server.address))) for _ in range(3)]
    for viewer in viewers:
        assert [viewer.line() for _ in range(4)] == ["ready", *["seen"] * 3]
        viewer.signal(signal.SIGSTOP)
    talk = Talker(run(TALKS))
    talk("catch(50, size=20_000, wait=10)")
    assert talk("receipt()")["captured"] == 50
    check_history(server, 50)
    for viewer in viewers:
        viewer.signal(signal.SIGCONT)
        assert viewer.process.poll() is None


# each case in a fork: libzmq would abort it
NEAR_LIMITS = """
    import json, os, tempfile, time, torch, traceback, numpy as np, tensortap as tap
    from tests.limits import LEAVE, descriptors

    def train(limit, left):
        held = LEAVE[limit](left)
        before = len(descriptors()) if left > 2 else 0
        if (limit, left) == ("threads", 20):  # those are left to the workers of the program
            tap.init(tempfile.mkdtemp())
        if left in (0, 8, 12, 20):
            watcher = tap.watch(torch.nn.Linear(2, 2), on_record=print)
            watcher.catch(np.ones(2), "w")
            watcher.close(5)
            assert watcher.receipt.dropped == 1, watcher.receipt
        for i in range(10):
            tap.catch(np.full(2000, i), "x")
            time.sleep(0.01)
        assert tap.flush(10)
        r = tap.receipt()
        assert r.captured + r.dropped == 10, str(r)
        if r.dropped and before:
            assert len(descriptors()) <= before + 4, str(r)  # a pipe, and a segment with a nonce
        if left == 6:
            for number in held:
                os.close(number)
            while not tap.catch(-1, "late").wait(1):
                time.sleep(0.1)
        return r.captured

    found = []
    tried = {
        "descriptors": (2, 6, 8, 16, 86), "MiB": (4, 12, 20, 50, 400), "threads": (0, 1, 3, 20, 80)
    }
    for limit in tried:
        for left in tried[limit]:
            if not (child := os.fork()):
                code = 99
                try:
                    code = train(limit, left)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            found.append([limit, left, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])
    print(json.dumps(found))
"""


@pytest.mark.fault("no room for a connection")
def test_near_its_limits_a_program_drops_instead_of_ending(server, run, record_property):
    found = run(NEAR_LIMITS).result()
    record_property("tried", len(found))
    captured = [0, 0, 0, 0, 10]
    assert [count for _, _, count in found] == captured * 3, found
    assert server.history.written == 31
    assert len(server.history.records("late")) == 1
