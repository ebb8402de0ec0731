"""A live session in another process, asked over the wire."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import time
from typing import Any

import msgspec
import zmq

from tensortap.dtypes import itemsize
from tensortap.errors import NotFound, TensortapError
from tensortap.record import Kind, Record
from tensortap.select import fits
from tensortap.wire import messages as wire
from tensortap.wire import questions
from tensortap.wire.address import Address
from tensortap.wire.channel import Channel, State

_rows = msgspec.msgpack.Decoder(questions.Rows)
_held = msgspec.msgpack.Decoder(questions.Held)
_overview = msgspec.msgpack.Decoder(questions.Overview)


class LiveReader:
    """Asks a live session; a context manager, or `close` it."""

    def __init__(self, address: Address, timeout: float = 5.0) -> None:
        self.address = address
        self.timeout = timeout
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._context: zmq.Context[Any] = zmq.Context()
        self._channel = Channel(address, "viewer", self._context)
        who = wire.Client(secrets.token_bytes(16), socket.gethostname(), os.getpid())
        self._channel.proof = wire.Proof(b"", who)
        try:
            self._connect(timeout)
        except BaseException:
            self.close()
            raise

    def _connect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        failures = 0
        while self._channel.state is not State.OPEN:
            self._channel.poll(0.05)
            if self._channel.state is State.ABSENT:
                failures += 1
            # on loopback both kinds of connection are tried
            if time.monotonic() > deadline or (failures > 20 and not self._channel.refusal):
                why = self._channel.refusal or "nobody listens there; start one with tap.serve()"
                raise NotFound(f"no live session at {self.address}: {why}")

    def __enter__(self) -> LiveReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        if self._channel.state is State.OPEN:
            self._channel.send(wire.message(wire.GOODBYE, wire.Goodbye()))
        self._channel.close(linger=100)
        self._context.destroy(linger=100)

    def overview(self) -> questions.Overview:
        """All that the session has to say about itself."""
        return _overview.decode(self._ask(questions.OVERVIEW))

    def names(self) -> list[str]:
        return list(_rows.decode(self._ask(questions.NAMES)).names)

    def records(
        self,
        name: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        kind: Kind | None = None,
        last: int | None = None,
    ) -> list[Record]:
        heads = _rows.decode(self._ask(questions.HEADS, name=name)).records
        return [record for record in heads if fits(record, step, rank, kind)]

    def newer(self, mark: int, most: int = 1 << 14) -> tuple[int, list[Record]]:
        """Records without values that came after a mark (at first 0), and the next mark."""
        rows = _rows.decode(self._ask(questions.NEWER, mark=mark, most=most))
        return rows.mark, list(rows.records)

    def held(self, mark: int) -> questions.Held:
        """Which tensors came whole after a mark (at first 0)."""
        return _held.decode(self._ask(questions.HELD, mark=mark))

    def load(self, record: Record) -> Record:
        where = {"name": record.name, "seq": record.seq, "time_ns": record.time_ns}
        body = self._ask(questions.LOAD, rank=record.rank, **where)
        return wire.decode_records(body, [], itemsize)[0]

    def _ask(self, what: str, **arguments: Any) -> bytes:
        with self._lock:
            number = next(self._ids)
            if self._channel.state is not State.OPEN:
                self._connect(self.timeout)
            self._channel.send(wire.message(wire.QUERY, wire.Query(number, what, arguments)))
            deadline = time.monotonic() + self.timeout
            body, missing = bytearray(), -1
            while missing:
                if self._channel.state is not State.OPEN:
                    raise NotFound(f"the live session at {self.address} has gone")
                if time.monotonic() > deadline:
                    raise TensortapError(f"the live session at {self.address} does not answer")
                for kind, header, data in self._channel.poll(0.1):
                    if kind == wire.REPLY and header.id == number:
                        if header.error:
                            raise NotFound(header.error)
                        missing = header.body_nbytes
                        body = bytearray(missing)
                    elif kind == wire.PART and header.number == number and data is not None:
                        body[header.offset : header.offset + len(data)] = data
                        missing -= len(data)
                        deadline = time.monotonic() + self.timeout
            return bytes(body)
