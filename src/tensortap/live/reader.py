"""A reader of a live session in another process, over the wire."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import time
from typing import Any, TypeVar

import msgspec

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Kind, Record
from tensortap.live import messages as wire
from tensortap.live.address import Address, default_port, parse_address
from tensortap.live.answers import Heads, Overview, RecordList, TensorStepsList
from tensortap.live.channel import NO_KEY, Channel, ConnectionState

Answer = TypeVar("Answer", bound=msgspec.Struct)


def open_live(address: str | None = None, timeout: float = 5.0) -> LiveReader:
    """Return a reader of the live session at ``host:port``."""
    return LiveReader(parse_address(address), timeout)


class LiveReader:
    """A client that asks a server questions; a context manager, or `close` it."""

    def __init__(self, address: Address, timeout: float = 5.0) -> None:
        self.address = address
        self.timeout = timeout
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        client = wire.Client(secrets.token_bytes(16), socket.gethostname(), os.getpid())
        self._channel = Channel(address, wire.hello("viewer", client))
        try:
            self._connect(timeout)
        except BaseException:
            self.close()
            raise

    def _connect(self, timeout: float) -> None:
        start = time.monotonic()
        while self._channel.state is not ConnectionState.OPEN:
            self._channel.poll(0.05)
            refusal, waited = self._channel.refusal, time.monotonic() - start
            absent = self._channel.state is ConnectionState.ABSENT and refusal in ("", NO_KEY)
            # a session that is being restarted gets a second
            if waited > (min(timeout, 1.0) if absent else timeout):
                port = self.address.port
                verb = "tap.serve()" if port == default_port() else f"tap.serve(port={port})"
                reason = refusal or f"no server is listening on port {port}; start one: {verb}"
                raise NotFound(f"no live session at {self.address}: {reason}")

    def __enter__(self) -> LiveReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._channel.state is ConnectionState.OPEN:
            self._channel.send(wire.message(wire.GOODBYE, wire.Goodbye()))
        self._channel.end(linger=100)

    def overview(self) -> Overview:
        """Return the clients, names and counts of the session."""
        return self._ask(Overview, "overview")

    def names(self) -> list[str]:
        return list(self._ask(RecordList, "names").names)

    def records(
        self,
        name: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        kind: Kind | None = None,
        last: int | None = None,
    ) -> list[Record]:
        wanted = msgspec.structs.asdict(Heads(name, step, rank, kind, last))
        return list(self._ask(RecordList, "heads", **wanted).records)

    def since(self, cursor: int) -> tuple[int, list[Record]]:
        """Return the next cursor and the records after this one (0 at first), without values."""
        found = self._ask(RecordList, "since", cursor=cursor)
        return found.cursor, list(found.records)

    def tensor_steps(self, cursor: int) -> TensorStepsList:
        """Return which whole tensors arrived after a cursor (0 at first)."""
        return self._ask(TensorStepsList, "tensor_steps", cursor=cursor)

    def load(self, record: Record) -> Record:
        key = {"name": record.name, "seq": record.seq, "time_ns": record.time_ns}
        body = self.query("load", rank=record.rank, **key)
        return wire.decode_records(body, [])[0]

    def _ask(self, answer: type[Answer], what: str, **arguments: Any) -> Answer:
        return msgspec.msgpack.decode(self.query(what, **arguments), type=answer)

    def query(self, what: str, **arguments: Any) -> bytes:
        """Return the encoded answer to a question."""
        with self._lock:
            number = next(self._ids)
            if self._channel.state is not ConnectionState.OPEN:
                self._connect(self.timeout)
            self._channel.send(wire.message(wire.QUERY, wire.Query(number, what, arguments)))
            deadline = time.monotonic() + self.timeout
            body, missing = bytearray(), -1
            while missing:
                if self._channel.state is not ConnectionState.OPEN:
                    raise NotFound(f"the live session at {self.address} has closed")
                if time.monotonic() > deadline:
                    raise TensortapError(f"the live session at {self.address} does not answer")
                for kind, header, data in self._channel.poll(0.1):
                    if kind == wire.REPLY and header.id == number:
                        if header.error:
                            raise NotFound(header.error)
                        missing = header.body_nbytes
                        body = bytearray(missing)
                    elif kind == wire.CHUNK and header.number == number and data is not None:
                        body[header.offset : header.offset + len(data)] = data
                        missing -= len(data)
                        deadline = time.monotonic() + self.timeout
            return bytes(body)
