"""Alerts, findings, and their conversion to and from records."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from tensortap.core.record import Kind, Mapping, Record, Value
from tensortap.core.rooms import offers

ALERT, HINT = "alert", "hint"  # severities
WHY = "why"  # the rule of verdicts: which operation made a value, and why
_PARAMETER_KINDS = frozenset((Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE))


class Finding(NamedTuple):
    """Details that a rule returns when a message alone is not enough.

    `origin` is the module that caused the problem, if it is not the module of the tensor;
    `facts` are numbers.
    """

    message: str
    origin: str = ""
    facts: dict[str, float] = {}  # noqa: RUF012  never changed


class Alert(msgspec.Struct, frozen=True):
    """A problem with a tensor that a rule has found.

    `kind` is the kind of the tensor, `module` the module it belongs to, `origin` the module that
    caused the problem. `again` counts how often the rule found the problem in this tensor between
    its previous alert and this one, without reporting it. `explanation` is what a room
    knows about the operation behind it. `severity` is ``"alert"``, or ``"hint"`` for what may well
    be meant so.
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
    explanation: Any = None
    severity: str = ALERT

    def __str__(self) -> str:
        rank = f" rank {self.rank}" if self.rank else ""
        hint = "hint: " if self.severity == HINT else ""
        return f"step {self.step}{rank}, {self.name} ({self.kind.value}): {hint}{self.message}"


def module_of(record: Record) -> str:
    """Return the name of the module that a record belongs to.

    >>> module_of(Record("fc.weight", Kind.WEIGHT, 0, 0, 0, 0, 1, 0))
    'fc'
    """
    module = record.tags.get("module")
    if module is not None:
        return module
    if record.kind in _PARAMETER_KINDS:
        # optimizer state belongs to the module of its parameter
        return record.tags.get("parameter", record.name).rpartition(".")[0]
    return "" if record.kind is Kind.METRIC else record.name


def may_be_mask(record: Record) -> bool:
    """Return whether all infinities of an output are -Inf, as in masked attention scores."""
    stats = record.stats
    if record.kind is not Kind.ACTIVATION or stats is None:
        return False
    return stats.neginfs > 0 and not stats.posinfs


_TEXTS = ("rule", "message", "module", "origin")


def record_of(
    alert: Alert, *, seq: int, time_ns: int, world_size: int = 1, rank: int | None = None
) -> Record:
    """Return the alert as a record of kind Alert under the name of its tensor.

    `rank` is the one that has raised it, if it is about another one.
    """
    fields: dict[Value, Value] = {name: getattr(alert, name) for name in _TEXTS}
    fields |= {"kind": alert.kind.value, "again": alert.again}
    if rank is not None and rank != alert.rank:
        fields["rank"] = alert.rank
    if alert.severity != ALERT:
        fields["severity"] = alert.severity
    fields["facts"] = Mapping(tuple(alert.facts.items()))
    if alert.explanation is not None:
        fields["explanation"] = msgspec.json.encode(alert.explanation).decode()
    return Record(
        alert.name, Kind.ALERT, alert.step, alert.call, seq,
        alert.rank if rank is None else rank, world_size, time_ns,
        type="tensortap.alerts.Alert", value=Mapping(tuple(fields.items())),
    )  # fmt: skip


def alert_of(record: Record) -> Alert:
    """Return the alert in a record of kind Alert; missing or malformed fields become empty."""
    fields = _string_items(record.value)
    facts = _string_items(fields.get("facts"))
    again, rank = fields.get("again"), fields.get("rank")
    explained = str(fields.get("explanation", ""))
    decoders = offers("alerts.explanation") if explained else ()
    try:
        kind = Kind(str(fields.get("kind")))
    except ValueError:
        kind = Kind.VALUE
    return Alert(
        name=record.name,
        kind=kind,
        step=record.step,
        rank=rank if isinstance(rank, int) else record.rank,
        call=record.call,
        again=again if isinstance(again, int) else 0,
        facts={name: v for name, v in facts.items() if isinstance(v, (int, float))},
        explanation=next((decode(explained) for decode in decoders), None),
        severity=HINT if fields.get("severity") == HINT else ALERT,
        **{name: str(fields.get(name, "")) for name in _TEXTS},
    )


def _string_items(value: Value) -> dict[str, Any]:
    """Return the items of a mapping whose keys are strings; records may come from anyone."""
    items = value.items if isinstance(value, Mapping) else ()
    return {name: item for name, item in items if isinstance(name, str)}
