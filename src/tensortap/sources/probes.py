"""`list_probes`: what of a model can be watched."""

from __future__ import annotations

from typing import Any

from tensortap.frameworks.observing import Probe
from tensortap.frameworks.registry import loaded_frameworks
from tensortap.pipeline.pipeline import pipeline

__all__ = ["Probe", "Probes", "list_probes"]


class Probes(tuple[Probe, ...]):
    """The probes that `list_probes` has found; printed, they are a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("name", "type", "shape", "dtype", "output", "gradient", "in place", "")
        ]
        for p in self:
            shape = "×".join(map(str, p.shape)) or "scalar"
            marks = ("yes" if mark else "no" for mark in (p.output, p.gradient, p.in_place))
            rows.append((p.name, p.type, shape if p.dtype else "", p.dtype, *marks, p.note))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def list_probes(model: Any, *inputs: Any, **named: Any) -> Probes:
    """Return what of a model can be watched: ``print(tap.list_probes(model, batch))``.

    Runs the model forward and backward once, on copies of the inputs. Gradients, buffers, random
    numbers and the mode of the model are afterwards as they were.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(inplace=True))
    >>> [(p.name, p.shape, p.gradient, p.in_place) for p in list_probes(model, torch.ones(1, 2))][1]
    ('0', (1, 3), True, True)
    """
    enabled = pipeline.enabled
    pipeline.switch(False)  # nobody tracks or watches this pass
    try:
        for framework in loaded_frameworks():
            probes = framework.find_probes(model, inputs, named)
            if probes is not None:
                return Probes(probes)
    finally:
        pipeline.switch(enabled)
    raise TypeError(f"list_probes needs a torch.nn.Module, got {model!r:.100}")
