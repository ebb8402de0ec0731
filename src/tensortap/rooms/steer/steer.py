"""`session.probes` and `session.probe`: what a running job looks at, and how to change it."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tensortap.core.arguments import check_count
from tensortap.core.files import plain
from tensortap.core.patterns import TypedPattern
from tensortap.core.probes import CHANGE, Probe, ProbeRequest
from tensortap.core.record import Record
from tensortap.rooms.steer.asking import Announcement, Program

_programs = msgspec.msgpack.Decoder(list[Program])
_announcement = msgspec.msgpack.Decoder(Announcement)


class ProbeList(list[Program]):
    """The programs of a session with their probes; prints as a table."""

    def __repr__(self) -> str:
        lines = []
        for program in self:
            at = f"step {program.step}" if program.step >= 0 else "no step yet"
            lines.append(f"rank {program.rank} of {program.program}: {program.trouble or at}")
            lines += [f"  {describe(probe)}" for probe in program.probes]
            if program.left_out:
                lines.append(f"  … and {program.left_out} more: give a pattern")
        return "\n".join(lines) or "no program is connected to this session"


def describe(probe: Probe) -> str:
    """Return a probe in one line.

    >>> describe(Probe("blocks.0.attn", "Activation", 10, False, 3, 61_000))
    'blocks.0.attn Activation: every 10 steps, seen 3 times, 20 µs each'
    """
    state = "off" if not probe.every else f"every {probe.every} steps" if probe.every > 1 else "on"
    kept = ", kept whole" if probe.tensors and probe.every else ""
    each = f", {probe.spent_ns / probe.seen / 1000:.0f} µs each" if probe.spent_ns else ""
    seen = f", seen {probe.seen} times{each}" if probe.seen else ""
    return f"{plain(probe.name)} {plain(probe.kind)}: {state}{kept}{seen}"


class ProbeChange(msgspec.Struct, frozen=True):
    """The outcome of a change: the step that was announced, and a line for each rank."""

    at: int
    ranks: dict[str, str]
    complete: bool
    """True if every rank changed at that step."""

    def __repr__(self) -> str:
        head = f"from step {self.at} on" if self.at else "now"
        lines = (f"  {plain(rank)}: {plain(text)}" for rank, text in self.ranks.items())
        return "\n".join([head, *lines])


def probes(session: Any, pattern: str = "") -> ProbeList:
    """Return what the programs of a session can look at, and what it has cost so far."""
    TypedPattern(pattern)  # raises here, not in every program
    return ProbeList(_programs.decode(session.ask("probes", pattern=pattern)))


def probe(
    session: Any,
    pattern: str = "",
    *,
    every: int = 1,
    tensors: bool = False,
    steps: int = 0,
    kind: str | Sequence[str] | None = None,
    off: bool = False,
    reset: bool = False,
    trace: str | None = None,
    ops: bool = False,
    rules: str | Sequence[str] | None = None,
    stop: bool = False,
    recompile: bool = False,
    timeout: float = 10.0,
) -> ProbeChange:
    """Change what the programs of a session look at, on all ranks from one step on.

    See `tensortap.Session.probe` for the arguments.
    """
    check_count("every", every, 0)
    check_count("steps", steps, 0)
    chosen = [(trace is not None, "trace"), (ops, "ops"), (rules is not None, "rules"),
              (stop, "stop"), (reset, "reset")]  # fmt: skip
    actions = [action for is_chosen, action in chosen if is_chosen]
    if len(actions) > 1:
        raise ValueError(f"choose one of {', '.join(actions)}")
    action: Any = actions[0] if actions else "probe"
    if action == "trace":
        pattern = str(trace)
    elif action == "rules":
        pattern = rules if isinstance(rules, str) else ",".join(rules or ())
    else:
        TypedPattern(pattern)
    kinds = () if kind is None else (kind,) if isinstance(kind, str) else tuple(kind)
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        user = "somebody"
    wanted = ProbeRequest(
        action, pattern, kinds, 0 if off else every, tensors, steps,
        recompile=recompile, by=f"{user}@{socket.gethostname()}",
    )  # fmt: skip
    told = _announcement.decode(session.ask("probe", **msgspec.structs.asdict(wanted)))
    return _outcome(session, told, timeout)


def _outcome(session: Any, told: Announcement, timeout: float) -> ProbeChange:
    """Wait until each rank has recorded the change, or until the time is up."""
    end = time.monotonic() + timeout
    expected = {(p.rank, p.pid): p for p in told.programs}
    while True:
        done = _recorded(session.reader.records(CHANGE), told.number)
        waiting = [p for p in told.programs if not p.trouble and p.rank not in done]
        if not waiting or time.monotonic() > end:
            break
        time.sleep(0.05)
    ranks = {}
    for program in expected.values():
        record = done.get(program.rank)
        if record is not None:
            late = (
                ""
                if record.step <= told.at or not told.at
                else f"too late, at step {record.step}: "
            )
            text = late + record.tags.get("done", "")
        else:
            text = program.trouble or f"not yet: it is before step {told.at}"
        ranks[f"rank {program.rank} (process {program.pid})"] = text
    refused = ("refused", "failed", "too late", "nothing")
    complete = not waiting and not any(p.trouble for p in told.programs)
    return ProbeChange(
        told.at, ranks, complete and not any(t.startswith(refused) for t in ranks.values())
    )


def _recorded(records: list[Record], number: int) -> dict[int, Record]:
    return {r.rank: r for r in records if r.tags.get("number") == str(number)}
