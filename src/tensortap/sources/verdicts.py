"""Verdicts of the black box on bad steps."""

from __future__ import annotations

from typing import NamedTuple

from tensortap.sources.operation_records import NonFiniteOperation

DETERMINISTIC, DATA, TRANSIENT, FINITE = "deterministic", "data", "transient", "finite"


class Verdict(NamedTuple):
    """The reason why a step went wrong, in one paragraph: `text`.

    `kind` is ``deterministic`` (it happens again), ``data`` (it goes away with another batch),
    ``transient`` (it does not happen again) or ``finite`` (nothing is wrong). `rows` are those of
    the batch that cause it, `replayed` how many steps were run again, and `same` whether they
    computed the same bits as the first time.
    """

    kind: str
    step: int
    rank: int
    finding: NonFiniteOperation | None
    rows: tuple[int, ...]
    replayed: int
    same: bool
    other: int | None
    text: str

    def __str__(self) -> str:
        return self.text


def paragraph(
    kind: str,
    step: int,
    rank: str,
    place: str,
    rows: tuple[int, ...],
    replayed: int,
    differs: int | None,
    other: int | None,
) -> str:
    """Return the verdict in words; `place` says which operation it was and why."""
    where = f"step {step}{rank}"
    steps = "1 step" if replayed == 1 else f"{replayed} steps"
    if kind == FINITE:
        return f"{where}: everything is finite. The replay of {steps} computed the same bits."
    if kind == TRANSIENT:
        if differs is not None and differs != step:
            cause = f"step {differs} computed other bits the first time"
        else:
            cause = "the same step with the same state, batch and random numbers is finite"
        return (
            f"{where}: transient. It does not happen again: in the replay of {steps}, {cause}. "
            "Suspect the hardware, a race, or state that the step keeps outside of model and "
            "optimizer."
        )
    same = "with the same bits" if differs is None else "though not with the same bits"
    again = f"It happens again in the replay of {steps}, {same}."
    if kind == DATA:
        named = ", ".join(map(str, rows[:8])) + (" …" if len(rows) > 8 else "")
        word = "row" if len(rows) == 1 else "rows"
        which = f"{word} {named} of the batch" if rows else "the batch"
        gone = f"It goes away with the batch of step {other}: check {which}."
        return f"{where}: data. {place}. {again} {gone}"
    tried = "No other batch was there to try."
    if other is not None:
        as_well = f"It happens with the batch of step {other} as well"
        tried = f"{as_well}: check the code and the state, not the data."
    return f"{where}: deterministic. {place}. {again} {tried}"
