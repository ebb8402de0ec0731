"""Mark functions that torch.compile must not trace, or replaces, without importing torch."""

from __future__ import annotations

import contextlib
import functools
import operator
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


@functools.cache
def hide_effects_from_partitioner() -> None:
    """Make graphs save for their backward pass what they would without operators with side effects.

    Buys: results in 16-bit floats keep more of their bits, and nothing more is computed and saved
    in steps that are not observed. Otherwise the compiler takes such an operator for the end of a
    kernel, and saves what comes behind it instead of computing it again.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._functorch import partitioners
        from torch._functorch._aot_autograd.utils import is_with_effects

        usual_ops = partitioners.get_default_op_list

        def get_default_op_list() -> Any:
            ops: Any = usual_ops()
            usual = ops.is_fusible

            def is_fusible(node: Any) -> bool:
                made_by = node.args[0] if node.target is operator.getitem else node
                effects = isinstance(made_by, type(node)) and is_with_effects(made_by)
                return effects or bool(usual(node))

            ops.is_fusible = is_fusible
            return ops

        partitioners.get_default_op_list = get_default_op_list
