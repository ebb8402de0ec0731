"""`catch`: any value, named or not, from anywhere in a program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tensortap.pipeline.pipeline import pipeline
from tensortap.pipeline.ticket import SKIPPED, Ticket
from tensortap.record import Shard
from tensortap.select import Gates
from tensortap.sources.names import CallSites

_getframe = sys._getframe
_tracers: set[type] = set()  # the classes of values that JAX has only traced yet
_sites = CallSites()
_known = _sites.known


def catch(
    value: Any,
    name: str | None = None,
    *,
    every: int = 1,
    first: int | None = None,
    when: bool | Callable[[Any], object] = True,
    changed: bool = False,
    server: str | None = None,
    shard: Shard | None = None,
) -> Ticket:
    """Catch a value, as it is now, for whoever listens: ``tap.catch(loss, every=10)``.

    Without a name it is named after the expression. `every` takes each n-th call under the
    name, `first` only that many of them, `when` is a condition or a function of the value,
    `changed` passes over a value that equals the last one kept. `server` is ``"host:port"``
    of another live session than the usual one. `shard` says which part of a larger tensor this
    rank's value is; of a DTensor it is known. Inside a function that JAX compiles, all of it
    is about the values that it computes each time it runs. Never raises, unless
    ``TENSORTAP_STRICT=1``.
    """
    try:
        if name is None:
            frame = _getframe(1)
            name = _known.get((id(frame.f_code), frame.f_lasti)) or _sites.lookup(frame)
        gate = pipeline.gates[name]
        if _tracers and type(value) in _tracers:
            return _when_it_runs(value, name, every, first, when, changed, server)
        number = gate.tick()
        if gate.step != pipeline.clock.step:
            gate.begin(number, pipeline.clock.step)
        if number % every or (first is not None and number >= first * every):
            return SKIPPED
        if not pipeline.on and server is None:
            pipeline.miss()
            return SKIPPED
        if (
            pipeline.hot is not None
            and when is True
            and not changed
            and server is None
            and shard is None
        ):
            ticket = pipeline.hot(value, name, number, gate.step, number - gate.base)
            if ticket is not None:
                return ticket
        return pipeline.capture(value, gate, number, when, changed, server, shard=shard)
    except Exception as error:
        return pipeline.fault(name, error, called=True)


def _look_for_tracers() -> None:
    """Learn JAX's classes once it is there; called when a name is new, so not in anybody's way."""
    if hasattr(sys.modules.get("jax"), "Array"):
        from tensortap.frameworks.jax.catch_in_jit import tracers

        _tracers.update(tracers())


def _when_it_runs(value: Any, name: str, *options: Any) -> Ticket:
    from tensortap.frameworks.jax.catch_in_jit import insert

    insert(value, name, *options)
    return SKIPPED


Gates.on_new = staticmethod(_look_for_tracers)

# torch.compile must not look inside: what happens here is no part of a graph
catch._torchdynamo_disable = True  # type: ignore[attr-defined]
