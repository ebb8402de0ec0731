"""`catch`: any value, named or not, from anywhere in a program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tensortap.pipeline.pipeline import pipeline
from tensortap.pipeline.selection import CallCounter
from tensortap.pipeline.ticket import SKIPPED, Ticket
from tensortap.record import Shard
from tensortap.sinks.connections import connections
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
        try:
            counter = pipeline.counters[name]
        except KeyError:
            counter = _first_call(name)
        if _tracers and type(value) in _tracers:
            return _when_it_runs(value, name, every, first, when, changed, server)
        number = counter.tick()
        if counter.step != pipeline.clock.step:
            counter.begin(number, pipeline.clock.step)
        if number % every or (first is not None and number >= first * every):
            return SKIPPED
        queues = None
        if server is not None:
            queues = connections.queues(server)
        elif not pipeline.on and (connections.tried or not connections.connect()):
            if pipeline.enabled:
                pipeline.ledger.count_unheard()
            return SKIPPED
        elif pipeline.fast is not None and when is True and not changed and shard is None:
            ticket = pipeline.fast(value, name, number, counter.step, number - counter.base)
            if ticket is not None:
                return ticket
        return pipeline.capture(
            value, counter, number, when=when, changed=changed, shard=shard, to=queues
        )
    except Exception as error:
        return pipeline.fault(name, error, calls=1)


def _first_call(name: str) -> CallCounter:
    """Create the counter of a new name, and learn JAX's tracer classes once JAX is imported."""
    if hasattr(sys.modules.get("jax"), "Array"):
        from tensortap.frameworks.jax.catch_in_jit import tracers

        _tracers.update(tracers())
    return pipeline.counters.of(name)


def _when_it_runs(value: Any, name: str, *options: Any) -> Ticket:
    from tensortap.frameworks.jax.catch_in_jit import insert

    insert(value, name, *options)
    return SKIPPED


# torch.compile must not look inside: what happens here is no part of a graph
catch._torchdynamo_disable = True  # type: ignore[attr-defined]
