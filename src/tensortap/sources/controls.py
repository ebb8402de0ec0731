"""Controls of the training side: the step, on and off, flush, and the receipt."""

from __future__ import annotations

from tensortap.pipeline.pipeline import pipeline
from tensortap.pipeline.receipt import Receipt


def step(number: int | None = None) -> int | None:
    """Advance the training step, or set it; call it once at the end of every step.

    Without it, the step of a record is the number of earlier calls under its name.
    """
    return pipeline.advance("tap.step()", number)


def enable() -> None:
    """Capture again after `disable`."""
    pipeline.switch(True)


def disable() -> None:
    """Capture nothing until `enable`; calls then cost almost nothing."""
    pipeline.switch(False)


def flush(timeout: float | None = None) -> bool:
    """Wait until everything captured has arrived or was dropped; return False on timeout."""
    return pipeline.flush(timeout)


def receipt() -> Receipt:
    """Return what was captured, what was not and why, and what it cost the training thread."""
    return pipeline.receipt()
