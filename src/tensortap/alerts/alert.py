"""What an alert says, and how it becomes a record."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from tensortap.record import Kind, Mapping, Record, Value

_PARAMETERS = frozenset((Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE))
_TYPE = "tensortap.alerts.Alert"


class Finding(NamedTuple):
    """What a rule says when it has more to say than a sentence.

    `origin` is the module that it comes from, where that is another one; `facts` are numbers.
    """

    message: str
    origin: str = ""
    facts: dict[str, float] = {}  # noqa: RUF012  never changed


class Alert(msgspec.Struct, frozen=True):
    """Something is wrong with a tensor: what, where, and since when.

    `kind` is that of the tensor, `module` the module it belongs to, `origin` the one that made
    it so. `again` counts how often the rule held after its last alert of this tensor, unsaid.
    """

    rule: str
    name: str
    kind: Kind
    step: int
    rank: int
    module: str
    message: str
    origin: str = ""
    call: int = 0
    again: int = 0
    facts: dict[str, float] = {}

    def __str__(self) -> str:
        rank = f" rank {self.rank}" if self.rank else ""
        return f"step {self.step}{rank}, {self.name} ({self.kind.value}): {self.message}"


def module_of(record: Record) -> str:
    """The module that a record belongs to.

    >>> module_of(Record("fc.weight", Kind.WEIGHT, 0, 0, 0, 0, 1, 0))
    'fc'
    """
    said = record.tags.get("module")
    if said is not None:
        return said
    if record.kind in _PARAMETERS:
        # the state of an optimizer belongs to its parameter
        return record.tags.get("parameter", record.name).rpartition(".")[0]
    return "" if record.kind is Kind.METRIC else record.name


def may_be_mask(record: Record) -> bool:
    """Whether the infinities of an output are all -Inf, as those of scores before a softmax."""
    stats = record.stats
    if record.kind is not Kind.ACTIVATION or stats is None:
        return False
    return stats.neginfs > 0 and not stats.posinfs


def record_of(alert: Alert, *, seq: int, time_ns: int, world_size: int = 1) -> Record:
    """The alert as a record: under the name of its tensor, of the kind Alert."""
    facts: tuple[tuple[Value, Value], ...] = tuple(alert.facts.items())
    value = Mapping(
        (
            ("rule", alert.rule),
            ("message", alert.message),
            ("kind", alert.kind.value),
            ("module", alert.module),
            ("origin", alert.origin),
            ("again", alert.again),
            ("facts", Mapping(facts)),
        )
    )
    return Record(
        alert.name,
        Kind.ALERT,
        alert.step,
        alert.call,
        seq,
        alert.rank,
        world_size,
        time_ns,
        type=_TYPE,
        value=value,
    )


def alert_of(record: Record) -> Alert:
    """The alert that a record of the kind Alert holds; what it lacks is empty."""
    said = _words(record.value)
    numbers = _words(said.get("facts"))
    try:
        kind = Kind(str(said.get("kind")))
    except ValueError:
        kind = Kind.VALUE
    again = said.get("again")
    return Alert(
        rule=str(said.get("rule", "")),
        name=record.name,
        kind=kind,
        step=record.step,
        rank=record.rank,
        module=str(said.get("module", "")),
        message=str(said.get("message", "")),
        origin=str(said.get("origin", "")),
        call=record.call,
        again=again if isinstance(again, int) else 0,
        facts={name: v for name, v in numbers.items() if isinstance(v, (int, float))},
    )


def _words(value: Value) -> dict[str, Any]:
    """What stands under words in a dict; a stranger may have put anything else into it."""
    items = value.items if isinstance(value, Mapping) else ()
    return {name: item for name, item in items if isinstance(name, str)}
