"""Two hundred programs on one session."""

from __future__ import annotations

import pytest

# two hundred processes that all begin at the same moment
CROWD = """
    import json, os, sys
    import tensortap as tap, tensortap.live.sink, tensortap.capture.queue
    results, starts = os.pipe(), os.pipe()
    for rank in range(200):
        if not os.fork():
            os.close(starts[1])
            os.read(starts[0], 1)
            for i in range(3):
                tap.catch(float(i), "x")
            flushed = tap.flush(60)
            r = tap.receipt()
            line = [flushed, r.captured, r.dropped, list(r.sessions.values())[0].split(",")[0]]
            os.write(results[1], json.dumps(line).encode() + b"\\n")
            os._exit(0)
    for fd in (results[1], *starts):
        os.close(fd)
    with os.fdopen(results[0]) as lines:
        print(json.dumps([json.loads(line) for line in lines]))
"""


@pytest.mark.slow
@pytest.mark.fault("two hundred programs at once", tried=200)
def test_two_hundred_processes_at_once(server, run):
    """All are heard, and a receipt straight after the flush is true."""
    assert run(CROWD).result() == [[True, 3, 0, "connected"]] * 200
    assert server.history.written == 600
    assert not server.rejected
