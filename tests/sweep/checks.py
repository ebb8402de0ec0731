"""Track a model for two steps, and check everything against a twin that is not tracked."""

from __future__ import annotations

import copy
import gc
import math
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import tensortap as tap
from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind
from tensortap.rooms.track.observing import tensors_in
from tests.sweep.models import Maker

STEPS = 2
Key = tuple[Kind, str, int, int]  # kind, name, step, call


def problems(make: Maker) -> list[str]:
    """Return what is wrong after a model was tracked; nothing if all is right."""
    model, inputs = make()
    model.train()
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    reference = Reference(twin)
    expected = train(twin, inputs, reference.end_step)
    reference.close()
    if not identical(expected, train(other, inputs)):
        return ["the model is not reproducible, without tensortap"]
    errors = pipeline.receipt().reasons["error"]
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tap.track(model, optimizer=opt) as tracker:
        tracked = train(model, inputs, lambda step: tracker.step(), opt)
    found = []
    if not identical(expected, tracked):
        found.append("training is not bit-identical")
    if pipeline.receipt().reasons["error"] != errors:
        found.append("a hook has counted an error")
    if set(tracker.unseen) != reference.uncalled():
        found.append(f"unseen {sorted(tracker.unseen)}, expected {sorted(reference.uncalled())}")
    found += statistics(tracker, reference.values)
    if hooks_of(model) != hooks_of(twin):
        found.append("hooks are left on modules")
    if opt._optimizer_step_pre_hooks or opt._optimizer_step_post_hooks or "zero_grad" in vars(opt):
        found.append("hooks are left on the optimizer")
    # a model that is in a cache of its library, or in a cycle with it, stays alive anyway
    alive, without = weakref.ref(model), weakref.ref(other)
    del model, other, opt, tracked
    gc.collect()
    if alive() is not None and without() is None:
        found.append("the model is kept alive")
    return found


def hooks_of(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Return how many hooks each module has; some libraries leave their own at the first call."""
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def train(model: Any, inputs: dict[str, Any], end_step: Any = None, opt: Any = None) -> list[Any]:
    """Train two steps; return losses, gradients and weights."""
    opt = opt or torch.optim.AdamW(model.parameters(), lr=1e-3)
    results: list[Any] = []
    for step in range(STEPS):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(step)
        opt.zero_grad()
        loss = loss_of(model(**inputs))
        loss.backward()
        results.append(loss.detach())
        results += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        opt.step()
        if end_step is not None:
            end_step(step)
    return [*results, *(value.clone() for value in model.state_dict().values())]


def loss_of(output: Any) -> torch.Tensor:
    """Return a loss that all differentiable parts of an output take part in."""
    parts = [t.float().square().mean() for _, t in tensors_in(output, torch.Tensor)
             if t.requires_grad and t.is_floating_point()]  # fmt: skip
    return torch.stack(parts).sum()


def identical(a: list[Any], b: list[Any]) -> bool:
    """Return whether all tensors have the same bits."""
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.dtype == y.dtype and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))


class Reference:
    """What a model computes, observed by hooks of its own and summarized in float64."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.values: dict[Key, list[dict[str, float]]] = {}
        self._step = 0
        self._calls: dict[str, int] = {}
        self._called: set[torch.nn.Module] = set()
        self._trained: set[int] = set()
        self._handles = [
            module.register_forward_hook(self._hook(name or type(model).__name__))
            for name, module in model.named_modules()
        ]
        for name, parameter in model.named_parameters():
            self._keep((Kind.WEIGHT, name, -1, 0), parameter)

    def _hook(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            self._called.add(module)
            for path, tensor in tensors_in(output, torch.Tensor):
                self._keep((Kind.ACTIVATION, name + path, self._step, call), tensor)

        return hook

    def _keep(self, key: Key, tensor: torch.Tensor) -> None:
        self.values.setdefault(key, []).append(summary(tensor))

    def end_step(self, step: int) -> None:
        self._step = step + 1
        self._calls.clear()
        for name, parameter in self.model.named_parameters():
            self._keep((Kind.WEIGHT, name, step, 0), parameter)
            if parameter.grad is not None:
                self._trained.add(id(parameter))
                self._keep((Kind.WEIGHT_GRADIENT, name, step, 0), parameter.grad)

    def uncalled(self) -> set[str]:
        """Return the modules that were never called, but whose weights were trained."""

        def trained(module: torch.nn.Module) -> set[int]:
            return {id(p) for p in module.parameters(recurse=False)} & self._trained

        tied = {weight for module in self._called for weight in trained(module)}
        return {
            name
            for name, module in self.model.named_modules()
            if module not in self._called and trained(module) and not trained(module) & tied
            and type(module).forward is not torch.nn.Module.forward
        }  # fmt: skip

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def summary(tensor: torch.Tensor) -> dict[str, float]:
    """Return statistics computed in float64."""
    values = tensor.detach().flatten()
    values = values.to(torch.complex128).abs() if tensor.is_complex() else values.double()
    finite = values[values.isfinite()]
    found = {
        "count": values.numel(),
        "zeros": int((values == 0).sum()),
        "nans": int(values.isnan().sum()),
    }
    if finite.numel():
        found |= {
            "min": finite.min().item(),
            "max": finite.max().item(),
            "max_abs": finite.abs().max().item(),
            "mean": finite.mean().item(),
            "mean_abs": finite.abs().mean().item(),
            "std": finite.std().item() if finite.numel() > 1 else 0.0,
            "rm2": finite.square().mean().sqrt().item(),
        }
    return found


def statistics(tracker: Any, expected: dict[Key, list[dict[str, float]]]) -> Iterator[str]:
    """Yield what differs between the records of a tracker and the reference, at most three."""
    records: dict[Key, Any] = {}
    for record in tracker.records:
        records[record.kind, record.name, record.step, record.call] = record
    missing = [key for key in expected if key not in records]
    extra = [
        key for key in records
        if key[0] in (Kind.ACTIVATION, Kind.WEIGHT, Kind.WEIGHT_GRADIENT) and key not in expected
    ]  # fmt: skip
    if missing:
        yield f"{len(missing)} records are missing, like {missing[0]}"
    if extra:
        yield f"{len(extra)} records are unexpected, like {extra[0]}"
    wrong = [key for key, (want, *_) in expected.items()
             if key in records and not _agrees(records[key].stats, want)]  # fmt: skip
    if wrong:
        got = records[wrong[0]].stats
        yield f"{len(wrong)} statistics are wrong, like {wrong[0]}: {got}, {expected[wrong[0]][0]}"


def _agrees(stats: Any, want: dict[str, float]) -> bool:
    scale = want.get("max_abs", 1.0)
    return stats is not None and all(
        math.isclose(getattr(stats, name), value, rel_tol=1e-9, abs_tol=1e-9 * scale)
        for name, value in want.items()
    )
