"""Shared memory where both ends share a host, the socket where they do not or it fails."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tensortap.api.lookup import get as fetch
from tests.live.server.clients import Proxy
from tests.live.talking import TALKS, Talker, segments


def can(*command: str) -> bool:
    """Whether this user may do that."""
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0


SEND = """
    import json, numpy as np, tensortap as tap
    for i in range(10):
        assert tap.catch(np.full(100_000, i), "x").wait(60), str(tap.receipt())
        assert tap.catch(i, "small").wait(60)
    r = tap.receipt()
    print(json.dumps([r.captured, r.dropped, r.sessions.popitem()[1]]))
"""


def test_one_host_shares_memory_instead_of_sending_bytes(serving, run):
    where = serving()
    talk = Talker(run(TALKS, to=where.address))
    talk("catch(10, size=1_000_000, wait=60)")  # 80 MB
    assert talk("receipt()")["state"] == ["connected, through shared memory"]
    sent = where.ask("int(open('/proc/self/io').read().split('rchar: ')[1].split()[0])")
    assert sent < 20e6
    # both have the arena mapped
    assert segments(talk.program.pid) == 2  # and the segment with the nonce
    assert segments(where.pid) == 1
    assert where.ask("[int(x[-1]) for x in tap.get_all('x')]") == list(range(10))


def test_another_host_gets_the_bytes_over_the_socket(serving, run):
    # connected over loopback, and yet the processes of the other side cannot be seen
    apart = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
    if can(*apart):
        where, lie = serving(before=apart), ""
    else:
        # without the right to make namespaces: a program that knows itself by another number
        where, lie = serving(), "import os; os.getpid = lambda: 1\n"
    program = run(lie + textwrap.dedent(SEND), to=where.address)
    assert program.result() == [20, 0, "connected, over TCP"]
    assert where.ask("[int(x[-1]) for x in tap.get_all('x')]") == list(range(10))
    assert where.ask("answers.overview(server).clients[0].path") == "TCP"


BIG = """
    import json, numpy as np, tensortap as tap
    x = np.ones(3_000_000)  # 24 MB
    for i in range(3):
        x[0] = i
        assert tap.catch(x, "x").wait(60), str(tap.receipt())
    r = tap.receipt()
    print(json.dumps([r.captured, r.dropped]))
"""


@pytest.mark.fault("no shared memory left")
def test_a_tiny_dev_shm_is_enough(serving, run):
    tiny = ("unshare", "-m", "sh", "-c",
            'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$0" "$@"')  # fmt: skip
    if not can(*tiny):
        # without the right to mount: files, and what is like them, of 16 MB at most
        tiny = ("sh", "-c", 'ulimit -f 16384; exec "$0" "$@"')
    where = serving(memory="1GB", before=tiny)
    assert run(BIG, to=where.address, before=tiny, TENSORTAP_ARENA="4MB").result() == [3, 0]
    assert where.ask("[[int(x[0]), int(x.sum())] for x in tap.get_all('x')]") == [
        [i, 2_999_999 + i] for i in range(3)
    ]


@pytest.mark.parametrize("left", [1, 3])  # sending without a copy needs five
@pytest.mark.fault("no descriptors left")
def test_no_descriptors_left_in_the_program(server, run, left):
    program = run(
        f"""
        import json, os, resource, numpy as np, tensortap as tap
        assert tap.catch(0, "first").wait(60)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        held = [os.dup(0) for _ in range(200 - {left} - len(os.listdir("/proc/self/fd")) + 1)]
        for i in range(5):
            assert tap.catch(np.full(100_000, i), "x").wait(60), str(tap.receipt())
        print(json.dumps([tap.receipt().captured, tap.receipt().dropped]))
    """,
        TENSORTAP_NO_ARENA="1",
    )
    assert program.result() == [6, 0]
    assert [int(fetch(server.history, "x", i)[-1]) for i in range(5)] == [4, 3, 2, 1, 0]


def test_bytes_are_sent_if_the_server_cannot_map_a_segment(serving, run):
    where = serving()
    talk = Talker(run(TALKS, to=where.address))
    talk("catch(2, wait=60)")
    assert talk("receipt()")["state"] == ["connected, through shared memory"]
    where.ask(
        "[__import__('resource').setrlimit(7, (64, 64)), "
        "globals().update(held=[os.dup(0) for _ in range(65 - len(os.listdir('/proc/self/fd')))])]"
        " and 1"
    )
    where.stop()  # so that many are under way at once
    talk("catch(100, size=50_000)")  # too large for the message: from the arena
    where.go_on()
    assert talk("tap.flush(60)")
    r = talk("receipt()")
    assert (r["captured"], r["dropped"]) == (102, 0)
    assert r["state"] == ["connected, over TCP"]
    assert where.ask("[len(held), [os.close(f) for f in held]] and len(held)") > 10
    assert where.ask("[int(x[-1]) for x in tap.get_all('x')]") == list(range(102))


@pytest.mark.parametrize("arena", ["", "1"], ids=["shared memory", "TCP"])
@pytest.mark.fault("connection cut at random moments")
def test_records_sent_again_after_a_lost_connection_arrive_once(server, run, wait_for, arena):
    proxy = Proxy(server.address.port)
    try:
        talk = Talker(run(TALKS, to=f"127.0.0.1:{proxy.port}", TENSORTAP_NO_ARENA=arena))
        talk("catch(5, size=10_000, wait=60)")
        proxy.deaf = True  # from here on the program does not hear what has arrived
        talk("catch(20, size=10_000)")
        wait_for(lambda: server.history.written == 25)
        assert talk("receipt()")["captured"] == 25
        proxy.cut()
        proxy.deaf = False
        wait_for(lambda: sum(client.connected for client in server.clients.values()) == 1)
        assert talk("tap.flush(60)")
        talk("catch(20, size=10_000, wait=60)")
        r = talk("receipt()")
        assert (r["captured"] + r["disconnected"], r["dropped"] - r["disconnected"]) == (45, 0)
        assert server.history.written == r["captured"]
        steps = [record.step for record in server.history.records("x")]
        assert steps == sorted(set(steps))
        assert [int(fetch(server.history, "x", step=s)[-1]) for s in steps] == steps
        # it still goes through shared memory, and all blocks are returned
        assert r["state"][0].endswith("TCP" if arena else "shared memory")
        region = "_private" if arena else "_arena"
        whole = f"pool._collect() or not pool.{region}._leased"
        wait_for(lambda: talk(whole), what=lambda: talk(whole))
    finally:
        proxy.close()
