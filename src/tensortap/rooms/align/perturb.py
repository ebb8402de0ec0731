"""`tap.perturbed`: run a model with inputs that differ in their last bit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensortap.core.arguments import check_whole
from tensortap.core.errors import TensortapError
from tensortap.runs.init import opened
from tensortap.runs.layout import write_json
from tensortap.values.registry import parts

log = logging.getLogger("tensortap")

MARK = "perturbed.json"
"""The file in the folder of a run whose inputs were perturbed."""


@dataclass(slots=True)
class Perturbation:
    """The number of tensors that were perturbed so far: inputs of the model, and embeddings."""

    seed: int
    tensors: int = 0


@contextlib.contextmanager
def perturbed(model: Any, *, seed: int = 0) -> Iterator[Perturbation]:
    """Move each number that enters a torch model to a neighbor, so that a run shows its rounding.

    These are floating-point inputs of the model, and the outputs of its embeddings. Which neighbor
    depends on `seed` alone. The open run is marked, and `tap.compare(a, b, tolerance="auto")`
    finds it beside the reference `b`.
    """
    check_whole("seed", seed)
    found = Perturbation(seed)
    with contextlib.ExitStack() as stack:
        for part in parts(__package__):
            hooks = getattr(part, "perturb_inputs", None)
            if hooks is not None and stack.enter_context(hooks(model, found)):
                break
        else:
            raise TensortapError(f"model must be a module of torch, got {type(model).__name__}")
        run = opened()
        try:
            yield found
        finally:
            if not found.tensors:
                log.warning("tensortap: nothing was perturbed: the model had no such inputs")
            elif run is not None:
                content = {"format": 1, "seed": seed, "tensors": found.tensors}
                try:
                    write_json(run.path / MARK, content)
                except OSError as error:  # training goes on
                    log.warning("tensortap: %s is not marked as perturbed: %s", run.path, error)
