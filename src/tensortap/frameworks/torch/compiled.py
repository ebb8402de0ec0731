"""Hooks and torch.compile.

A hook has to leave the compiled graph to observe anything. Where a graph may break, it breaks it;
with ``fullgraph=True`` that would raise in the user's program, so there the hook compiles to
nothing and reports that its module is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.hidden import hide_from_compiler

FULLGRAPH = "it is part of a graph compiled with fullgraph=True, which a hook cannot leave"

_compiling: Callable[[], bool] = torch.compiler.is_compiling


def outside_graphs(
    hook: Callable[..., None], name: str, on_unseen: Callable[[str], None]
) -> Callable[..., None]:
    """Return the hook so that it runs outside of compiled graphs.

    `on_unseen` is called with the name where it cannot run.
    """

    def leave(*args: Any) -> None:
        hook(*args)

    def must_stay() -> bool:
        if private.must_not_break():
            on_unseen(name)
            return True
        private.skip_frame(on_call.__code__)
        return False

    hide_from_compiler(leave)
    private.constant_when_compiled(must_stay)

    def on_call(*args: Any) -> None:
        if _compiling() and must_stay():
            return
        leave(*args)

    if private.compiler_is_loaded():
        private.skip_frame(on_call.__code__)
    return on_call


def forget_graphs() -> None:
    """Make torch compile everything anew: existing graphs know nothing of new or removed hooks."""
    if private.compiler_is_loaded():
        torch.compiler.reset()
