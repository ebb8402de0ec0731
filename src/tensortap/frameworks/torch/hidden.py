"""What torch.compile must not look into, marked without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hide_from_compiler(function: Callable[..., Any]) -> None:
    """Make torch.compile break its graph where this function is called.

    Buys: what `torch.compiler.disable` does, without the seconds that importing the compiler takes
    in programs that do not use it. A release of torch that ignores the private mark would trace
    into the function.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
