"""The kinds that describe tensors, their spellings, and pandas, which frames need."""

from __future__ import annotations

from typing import Any

from tensortap.core.errors import MissingExtra
from tensortap.core.record import Kind

KINDS = (
    Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE,
    Kind.VALUE, Kind.LOCAL,
)  # fmt: skip
_STATE = Kind.OPTIMISER_STATE.value


def need_pandas(what: str) -> Any:
    """Return pandas, or raise MissingExtra with the command that installs it."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra.of(f"{what} needs pandas", "view") from None
    return pandas


def tensor_type(text: str) -> str | None:
    """Return the tensor type that a text means, or None.

    >>> tensor_type("Weight_Gradients"), tensor_type("Optimizer_State.exp_avg"), tensor_type("x")
    ('Weight_Gradient', 'Optimiser_State.exp_avg', None)
    """
    kind, dot, key = text.partition(".")
    spelling = kind.strip().lower().replace("optimizer", "optimiser")
    known = _TYPES.get(spelling.replace(" ", "_").replace("-", "_"))
    if known is None or (dot and known != _STATE):
        return None
    return f"{known}.{key}" if key else known


_TYPES = {spelling: k.value for k in KINDS for spelling in (k.value.lower(), f"{k.value.lower()}s")}
