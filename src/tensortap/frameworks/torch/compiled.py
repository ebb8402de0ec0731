"""Hooks and torch.compile: what a graph is broken for, and what stays out of sight.

A hook that observes has to leave the graph. In one that may break it does; in one that must not
(``fullgraph=True``) leaving would raise in the user's program, so the hook is compiled to nothing
and says what is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

WHOLE = "it is part of a graph compiled with fullgraph=True, which a hook cannot leave"

_compiling: Callable[[], bool] = torch.compiler.is_compiling


def outside(
    hook: Callable[..., None], name: str, on_unseen: Callable[[str], None]
) -> Callable[..., None]:
    """The hook, called outside of compiled graphs; `on_unseen` is told where it cannot be."""

    def leave(*args: Any) -> None:
        hook(*args)

    def must_stay() -> bool:
        if in_whole_graph():
            on_unseen(name)
            return True
        leave_alone(on_call.__code__)
        return False

    # what torch.compiler.disable and torch._dynamo.assume_constant_result set, without the
    # seconds that importing the compiler takes in programs that do not use it
    leave._torchdynamo_disable = True  # type: ignore[attr-defined]
    must_stay._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def on_call(*args: Any) -> None:
        if _compiling() and must_stay():
            return
        leave(*args)

    if "torch._dynamo" in sys.modules:
        leave_alone(on_call.__code__)
    return on_call


def leave_alone(code: CodeType) -> None:
    """Run this, and all that it calls, as it is; it is still looked into from within a graph.

    Where a graph breaks, what is called there would be compiled on its own: for every module anew.
    """
    try:
        from torch._C._dynamo import eval_frame
        from torch._dynamo.types import FrameAction, FrameExecStrategy

        skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        eval_frame.set_code_exec_strategy(code, skip)
    except (ImportError, AttributeError):  # another torch: slower to compile, not wrong
        return


def in_whole_graph() -> bool:
    """Whether the graph that is being compiled must not break; called while it is."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        compiler = InstructionTranslator.current_tx()
    except (ImportError, AttributeError):  # another torch: rather unseen than raised
        return True
    return bool(
        getattr(compiler, "one_graph", False) or getattr(compiler, "error_on_graph_break", False)
    )


def forget_graphs() -> None:
    """Let everything be compiled anew: what is compiled already knows nothing of other hooks."""
    if "torch._dynamo" not in sys.modules:
        return
    codes = getattr(torch._dynamo.convert_frame, "input_codes", None)
    if codes is None or getattr(codes, "seen", True):
        torch._dynamo.reset()


def is_whole(module: torch.nn.Module) -> bool:
    """Whether it is a module that torch.compile has wrapped with ``fullgraph=True``."""
    return bool(getattr(getattr(module, "dynamo_ctx", None), "fullgraph", False))
