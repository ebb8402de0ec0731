"""A live view beside ours: rerun."""

from __future__ import annotations

from multiprocessing.connection import Connection

from bench.harness import Row
from bench.live import _connect
from bench.peers import CALL, DELIVERED, TIMES, calls, peer, rates
from bench.processes import process, session


def _rerun_server(pipe: Connection) -> None:
    import rerun as rr

    rr.init("tensortap-bench")
    pipe.send(rr.serve_grpc(grpc_port=_free_port(), server_memory_limit="2GB"))
    pipe.recv()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@peer("rerun-sdk", CALL.format("1, 16 MiB"), DELIVERED.format("1, 16 MiB"))
def peers_rerun() -> list[Row]:
    import rerun as rr

    import tensortap as tap

    with process(session, "2GB") as server, process(_rerun_server) as other:
        _connect(server.recv(), buffer="300MB", overflow="block")
        rr.init("tensortap-bench")
        rr.connect_grpc(other.recv())
        stream = rr.get_global_data_recording()

        def log(x, name: str) -> None:
            rr.log(name, rr.Tensor(x.numpy()))

        def settle() -> None:
            stream.flush(timeout_sec=60)

        def all_of_ours(x) -> None:
            for _ in range(TIMES):
                tap.catch(x, "value")
            assert tap.flush(60)

        def all_of_theirs(x) -> None:
            for _ in range(TIMES):
                log(x, "value")
            settle()

        how = "tap.catch to a live session, rr.log of a tensor to its gRPC server"
        rows = calls(tap.catch, lambda: tap.flush(60), log, settle, how, "rerun")
        rows += rates(DELIVERED, all_of_ours, all_of_theirs, "rerun")
        rr.disconnect()
        return rows


ROWS = (peers_rerun,)
