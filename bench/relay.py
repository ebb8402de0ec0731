"""A slow network: a TCP relay that passes a bounded number of bytes per second."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from multiprocessing.connection import Connection

_PIECE = 16 << 10  # bytes


def relay(pipe: Connection, address: str, rate: int) -> None:
    """Send the address of a relay to `address`, and relay at most `rate` bytes per second."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send("{}:{}".format(*listener.getsockname()))
    road = threading.Lock()  # one for all connections and both directions

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one end has gone
            while piece := source.recv(_PIECE):
                with road:
                    time.sleep(len(piece) / rate)
                target.sendall(piece)
        for end in (source, target):
            end.close()

    while True:
        client, _ = listener.accept()
        server = socket.create_connection((host, int(port)))
        for ends in ((client, server), (server, client)):
            threading.Thread(target=forward, args=ends, daemon=True).start()
