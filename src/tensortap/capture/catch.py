"""`catch`: capture any value, from anywhere in a program; the step, on and off, the receipt."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tensortap.capture.ledger import Receipt
from tensortap.capture.names import CallSites
from tensortap.capture.pipeline import pipeline
from tensortap.capture.selection import CallCounter
from tensortap.capture.ticket import SKIPPED, Ticket
from tensortap.core.arguments import check_count, check_seconds, check_text, check_whole
from tensortap.core.busy import section
from tensortap.core.patterns import TypedPattern
from tensortap.core.probes import Probe, ProbeRequest, probes
from tensortap.core.record import Kind, Shard
from tensortap.core.rooms import offer
from tensortap.values.protocol import CompiledRun, Framework
from tensortap.values.registry import loaded_frameworks
from tensortap.values.torch.hidden import constant_when_compiled, replace_when_compiled

_getframe = sys._getframe
_traced: dict[type, Framework] = {}  # classes of values that have only been traced so far
_NOT_COMPILED = "{}= has no effect in a compiled function: catch what it returns"
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
    tokens: Any = None,
    positions: Any = None,
    mask: Any = None,
    cu_seqlens: Any = None,
    sequence: Any = None,
) -> Ticket:
    """Capture a value as it is now: ``tap.catch(loss, every=10)``.

    Without a name, the expression in the source is the name. `every` captures each n-th call of
    the name, `first` at most that many, `when` is a condition or a function of the value, and
    `changed` skips a value that equals the last one captured. `server` is the ``"host:port"`` of
    a live session other than the default. `shard` is the position of this rank's value in a
    larger tensor; a DTensor has its own. `tokens` are the ids that the rows of the value are about,
    which `tap.align` needs; `positions`, `mask` and `cu_seqlens` say how they are batched,
    `sequence` names the sequences that a cache goes on with.
    Inside a function that JAX compiles, the values of each run are captured. Never raises, unless
    ``TENSORTAP_STRICT=1``.
    """
    try:
        if name is None:
            frame = _getframe(1)
            name = _known.get((id(frame.f_code), frame.f_lasti)) or _name_at(frame)
        try:
            counter = pipeline.counters[name]
        except KeyError:
            described = positions, mask, cu_seqlens, sequence
            counter = _first_call(name, every, first, tokens, described)
        if _traced and type(value) in _traced:
            return _catch_when_run(
                value, name, when, every=every, first=first, changed=changed, server=server,
                tokens=tokens, shard=shard,
            )  # fmt: skip
        number = counter.tick()
        if counter.step != pipeline.clock.step:
            counter.begin(number, pipeline.clock.step)
        if number % every or (first is not None and number >= first * every):
            return SKIPPED
        if counter.sparse != 1 and counter.skips(number // every):
            return SKIPPED
        queues = None
        if server is not None:
            queues = pipeline.sessions.queues(server)
        elif not pipeline.on:
            pipeline.count_unheard()
            return SKIPPED
        elif pipeline.fast is None:
            if pipeline.expecting:
                pipeline.sessions.connect()
        elif when is True and not changed and shard is None and tokens is None:
            ticket = pipeline.fast(value, name, number, counter.step, number - counter.base)
            if ticket is not None:
                return ticket
        tags = None
        if tokens is not None:
            described = positions, mask, cu_seqlens, sequence
            tags = _describe_tokens(value, server, tokens, described)
        return pipeline.capture(value, counter, number, when, changed, shard, queues, tags=tags)
    except Exception as error:
        return _fault(name, error, every)


class _Sites:
    """The names under which values are caught, which a session may switch."""

    def probes(self) -> Iterator[Probe]:
        for counter in list(pipeline.counters.values()):
            yield Probe(counter.name, _KIND, counter.sparse, True, counter.calls)

    def change(self, request: ProbeRequest, step: int) -> str:
        if request.action not in ("probe", "reset") or _KIND not in (request.kind or [_KIND]):
            return ""
        matches = TypedPattern(request.pattern).search
        found = [each for each in list(pipeline.counters.values()) if matches(each.name)]
        for counter in found:
            counter.sparse = 1 if request.action == "reset" else request.every
            counter.until = step + request.steps if request.steps else None
        return f"{len(found)} catch sites" if found else ""


_KIND = Kind.VALUE.value
_switches = _Sites()
_name_at = section(_sites.lookup)  # `executing` has a lock


@section  # importing takes locks
def _first_call(
    name: str, every: Any, first: Any, tokens: Any, described: tuple[Any, ...]
) -> CallCounter:
    """Create the counter of a new name, and learn the classes of traced values."""
    if tokens is None and any(each is not None for each in described):
        raise TypeError("positions, mask, cu_seqlens and sequence describe tokens: pass tokens=ids")
    check_count("every", every)
    if first is not None:
        check_count("first", first, 0)
    probes.add(_switches)
    for framework in loaded_frameworks():
        _traced.update(dict.fromkeys(framework.traced_classes(), framework))
    return pipeline.counters.of(name)


@section  # importing takes locks
def _token_room() -> Callable[..., dict[str, str]]:
    found: Callable[..., dict[str, str]] = offer("catch.tokens")
    return found


def _describe_tokens(
    value: Any, server: str | None, tokens: Any, described: tuple[Any, ...]
) -> dict[str, str]:
    """Record the tokens of a batch, unless the last value had the same; return the tags."""
    if server is not None:
        raise TypeError("tokens and server: tokens go to runs and to the default session only")
    return _token_room()(value, tokens, *described)


def _fault(name: str | None, error: Exception, every: Any) -> Ticket:
    try:
        if name is not None:
            check_text("name", name)
        check_count("every", every)  # only here: a call that goes well does not pay for it
    except (TypeError, ValueError) as invalid:
        error = invalid
    counted = isinstance(name, str) and name in pipeline.counters
    return pipeline.fault(name, error, calls=int(counted))


def _catch_when_run(value: Any, name: str, when: Any, **options: Any) -> Ticket:
    """Make the function that is being compiled capture the value whenever it runs."""
    for option in ("tokens", "shard"):
        if options.pop(option) is not None:
            raise TypeError(_NOT_COMPILED.format(option))
    capture = functools.partial(_catch_run, name, options)
    wait = _traced[type(value)].catch_when_run(value, capture, when)
    if wait not in pipeline.settlers:
        pipeline.settlers.append(wait)
    return SKIPPED


def _catch_run(
    name: str, options: dict[str, Any], value: Any, when: Any, run: CompiledRun | None = None
) -> Ticket:
    """Capture a value that compiled code calls back with; each device counts its own calls."""
    if run is None:
        return catch(value, name, when=when, **options)
    try:
        key = name if run.devices == 1 else f"{name} on device {run.device}"
        counter = pipeline.counters.get(key) or pipeline.counters.setdefault(key, CallCounter(name))
        number, step = counter.tick(), pipeline.clock.step
        if counter.step != step:
            counter.begin(number, step)
        every, first = options["every"], options["first"]
        if number % every or (first is not None and number >= first * every):
            return SKIPPED
        if counter.sparse != 1 and counter.skips(number // every):
            return SKIPPED
        queues = None if options["server"] is None else pipeline.sessions.queues(options["server"])
        if queues is None and pipeline.expecting:
            pipeline.sessions.connect()
        changed = options["changed"]
        return pipeline.capture(value, counter, number, when, changed, run.shard, queues, run)
    except Exception as error:
        return _fault(name, error, options["every"])


def catch_grad(
    value: Any,
    name: str | None = None,
    *,
    every: int = 1,
    first: int | None = None,
    when: bool | Callable[[Any], object] = True,
    changed: bool = False,
    server: str | None = None,
) -> Any:
    """Capture the gradient of a value when it is computed: ``x = tap.catch_grad(x)``.

    Returns the value to go on with: JAX captures the gradient of what is returned. Without a name,
    the name is the expression in the source and ``.grad``. The other arguments are those of
    `catch`, and count gradients.
    """
    try:
        name = f"{_name_at(_getframe(1))}.grad" if name is None else name
        capture = functools.partial(
            catch, name=name, every=every, first=first, when=when, changed=changed, server=server
        )
        for framework in loaded_frameworks():
            marked = framework.catch_gradient(value, capture)
            if marked is not None:
                return marked
        raise TypeError(f"catch_grad takes a tensor of torch or JAX, got {type(value).__name__}")
    except Exception as error:
        _fault(name, error, every)
    return value


# -- inside functions that torch compiles ---------------------------------------------------

_graph_keys: dict[tuple[Any, ...], str] = {}


def _graph_key(name: str | None, suffix: str, **options: Any) -> str:
    """Return the key of a call in a compiled graph; torch calls this while it compiles."""
    from tensortap.values.torch import graphs, private

    name = _sites.lookup(private.traced_caller()) + suffix if name is None else name
    known = name, *sorted(options.items())
    if known not in _graph_keys:

        def capture(values: list[Any], note: str) -> None:
            condition = {"when": values[1]} if len(values) > 1 else {}
            catch(values[0], name, **options, **condition)

        _graph_keys[known] = graphs.register(f"tensortap.catch:{name}", capture)
    return _graph_keys[known]


def _reject_in_graph(name: str | None, cls: str) -> None:
    """Report a value that compiled code cannot catch; torch calls this while it compiles."""
    message = f"inside a function that torch compiles, only tensors are captured, not a {cls}"
    pipeline.fault(name or "a value", TypeError(message))


def _reject_option(name: str | None, option: str) -> None:
    """Report an option that compiled code ignores; torch calls this while it compiles."""
    pipeline.fault(name or "a value", TypeError(_NOT_COMPILED.format(option)))


def _catch_in_graph(
    value: Any, name: str | None = None, *, when: Any = True, **options: Any
) -> Ticket:
    """Stand in for `catch` where torch compiles a function."""
    from tensortap.values.torch import graphs

    for option in ("tokens", "positions", "mask", "cu_seqlens", "sequence", "shard"):
        if options.pop(option, None) is not None:
            _reject_option(name, option)
            return SKIPPED
    if not graphs.is_tensor(value):
        _reject_in_graph(name, type(value).__name__)
    elif graphs.is_tensor(when):
        graphs.catch(value, _graph_key(name, "", **options), when)
    else:
        graphs.catch(value, _graph_key(name, "", when=when, **options), None)
    return SKIPPED


def _catch_grad_in_graph(value: Any, name: str | None = None, **options: Any) -> Any:
    """Stand in for `catch_grad` where torch compiles a function."""
    from tensortap.values.torch import graphs

    if graphs.is_tensor(value) and value.requires_grad:
        graphs.look_at_gradient(value, None, _graph_key(name, ".grad", **options), "")
    else:
        _reject_in_graph(name, f"{type(value).__name__} that requires no gradient")
    return value


constant_when_compiled(_graph_key)
constant_when_compiled(_reject_in_graph)
constant_when_compiled(_reject_option)
replace_when_compiled(catch, _catch_in_graph)
replace_when_compiled(catch_grad, _catch_grad_in_graph)


def step(number: int | None = None) -> int | None:
    """Advance the training step, or set it; call it once at the end of every step.

    Without it, the step of a record is the number of earlier calls under its name.
    """
    try:
        number = None if number is None else check_whole("number", number)
    except TypeError as error:  # training goes on
        pipeline.fault("tap.step()", error)
        return pipeline.clock.step
    return pipeline.advance("tap.step()", number)


def enable(on: bool = True) -> None:
    """Capture again, or with ``enable(False)`` nothing; calls then cost almost nothing."""
    pipeline.switch(on)


def flush(timeout: float | None = None) -> bool:
    """Wait until everything captured has arrived or was dropped; return False on timeout."""
    check_seconds("timeout", timeout)
    return pipeline.flush(timeout)


def receipt() -> Receipt:
    """Return what was captured, what was not and why, and what it cost the training thread."""
    return pipeline.receipt()
