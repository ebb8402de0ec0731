"""What torch.compile must not look into, or replaces, marked without importing torch."""

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


def replace_when_compiled(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Make torch.compile trace another function where this one is called.

    Buys: what `torch.compiler.substitute_in_graph` does, without importing the compiler. A release
    of torch that ignores the private mark would trace into the function.
    """
    function.__dict__.pop("_torchdynamo_disable", None)
    function._torchdynamo_inline = other  # type: ignore[attr-defined]


def constant_when_compiled(function: Callable[..., Any]) -> None:
    """Make torch.compile call this function while it compiles and take the result as a constant.

    Buys: what `torch.compiler.assume_constant_result` does, without importing the compiler.
    Otherwise what it does is compiled into graphs, or breaks them.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
