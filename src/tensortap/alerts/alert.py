"""Alerts, findings, explanations of NaN and Inf, and their conversion to and from records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import msgspec

from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, Mapping, Record, Value

ALERT, HINT = "alert", "hint"  # severities
_PARAMETER_KINDS = frozenset((Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE))


# bounds on what a run may contain: it may come from anyone
_Text = Annotated[str, msgspec.Meta(max_length=4000)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Operand(msgspec.Struct, frozen=True):
    """A tensor that the operation read or wrote: its name, and its statistics in words."""

    name: _Text
    values: _Text


class ChainLink(msgspec.Struct, frozen=True):
    """An operation that led to the bad one: its record, its line, and what it made."""

    name: _Text
    operation: _Text
    line: _Text
    code: _Text
    output: _Text


class OperationExplanation(msgspec.Struct, frozen=True):
    """The operation behind an alert: its line, its operands, and the operations before it.

    `source` holds the lines around `line`, the first of which has the number `first_line`.
    """

    name: _Text
    operation: _Text
    phase: _Text
    module: _Text
    why: _Text
    file: _Text = ""
    line: _Count = 0
    function: _Text = ""
    first_line: _Count = 0
    source: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=32)] = ()
    operands: Annotated[tuple[Operand, ...], msgspec.Meta(max_length=32)] = ()
    chain: Annotated[tuple[ChainLink, ...], msgspec.Meta(max_length=32)] = ()

    def __repr__(self) -> str:
        return f"<explanation of {self.name}: {self.why}>"

    @property
    def place(self) -> str:
        """The line as ``file:line``; empty if it is not known."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def code(self) -> str:
        """The text of the line."""
        at = self.line - self.first_line
        return self.source[at].strip() if 0 <= at < len(self.source) else ""


def decode_explanation(text: str) -> OperationExplanation | None:
    """Return the explanation in the JSON of a record; None if there is none or it is malformed."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=OperationExplanation)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None


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
    its previous alert and this one, without reporting it. `explanation` is the operation behind it,
    if it is known. `severity` is ``"alert"``, or ``"hint"`` for what may well be meant so.
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
    explanation: OperationExplanation | None = None
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


WHY = "why"  # the rule of verdicts: which operation, and why
NO_VERDICT = (
    "there is no verdict. Wrap the step function: "
    "step = tap.blackbox(train_step, model, optimizer), or run a bad step inside of: "
    "with tap.ops(model)"
)


_NOT_FINITE = ("nan", "inf")  # rules whose alerts a verdict explains


def verdict_of(
    alerts: Iterable[Alert],
    step: int | None = None,
    rank: int | None = None,
    of: tuple[str, str] | None = None,
) -> Alert | None:
    """Return the newest verdict, or that of a step or rank; one with an explanation comes first.

    `of` is the kind and the name of a verdict.
    """
    all_ = [each for each in alerts if each.rule == WHY]
    found = [
        each
        for each in all_
        if step in (None, each.step)
        and rank in (None, each.rank)
        and of in (None, (each.kind.value, each.name))
    ]
    if all_ and not found:
        known = ", ".join(map(str, sorted({each.step for each in all_})[:8]))
        raise NotFound(f"no verdict of this step and rank; verdicts are of steps {known}")
    return max(found, key=lambda e: (e.step, e.explanation is not None), default=None)


def verdicts_of(alerts: Iterable[Alert]) -> Callable[[Alert], Alert | None]:
    """Return a function that finds the verdict that explains an alert; None if there is none.

    It is of the same step and rank; of several, one of the module where the alert began. What
    began on another rank is explained there.
    """
    known: dict[int, list[Alert]] = {}
    for each in alerts:
        if each.rule == WHY:
            known.setdefault(each.step, []).append(each)

    def find(alert: Alert) -> Alert | None:
        if alert.rule == WHY:
            return alert
        of_step = known.get(alert.step, []) if alert.rule in _NOT_FINITE else []
        began = alert.origin or alert.module
        own = [each for each in of_step if each.rank == alert.rank]
        best = max(own, key=lambda e: (e.module == began, e.explanation is not None), default=None)
        if best is None or best.explanation is not None:
            return best
        same = (e for e in of_step if e.message == best.message and e.explanation is not None)
        return next(same, best)

    return find


def verdict_key(verdict: Alert | None) -> str:
    """Return the address of a verdict within a run: its step, rank, kind and name."""
    if verdict is None:
        return ""
    return f"{verdict.step} {verdict.rank} {verdict.kind.value} {verdict.name}"


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
        explanation=decode_explanation(str(fields.get("explanation", ""))),
        severity=HINT if fields.get("severity") == HINT else ALERT,
        **{name: str(fields.get(name, "")) for name in _TEXTS},
    )


def _string_items(value: Value) -> dict[str, Any]:
    """Return the items of a mapping whose keys are strings; records may come from anyone."""
    items = value.items if isinstance(value, Mapping) else ()
    return {name: item for name, item in items if isinstance(name, str)}
