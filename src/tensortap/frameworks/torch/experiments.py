"""Experiments with a torch model, for `tap.check`."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tensortap.frameworks.experiments import Dependence, LossFact
from tensortap.frameworks.observing import tensors_in
from tensortap.frameworks.snapshot import digest_of
from tensortap.frameworks.torch.held import hold, released
from tensortap.frameworks.torch.optimizers import find_optimizers, parameters_of
from tensortap.frameworks.torch.tensors import quiet

_TOLERANCE = 1e-4  # of the largest output; other batches may round differently


class TorchExperiments:
    """Experiments with a module: how a step calls it, and what its outputs depend on."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._call: Any = None  # arguments of the first call
        self._losses: list[LossFact] = []

    @contextlib.contextmanager
    def same_structure(self, optimizer: Any) -> Iterator[None]:
        modules = [(each, dict(each._parameters)) for each in self._model.modules()]
        trainable = [(each, each.requires_grad) for each in self._model.parameters()]
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        optimizers = [each.optimizer for each in find_optimizers(given) if not each.wraps]
        groups = [(each, each.param_groups[:]) for each in optimizers]
        params = [(each, each["params"][:]) for _, kept in groups for each in kept]
        try:
            yield
        finally:
            for module, parameters in modules:
                module._parameters.clear()
                module._parameters.update(parameters)
            for parameter, requires_grad in trainable:
                parameter.requires_grad_(requires_grad)
            for group, tensors in params:
                group["params"][:] = tensors
            for each, kept in groups:
                each.param_groups[:] = kept
                for tensor in set(each.state) - set(parameters_of(each)):
                    del each.state[tensor]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        def remember(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if self._call is None:
                with quiet():
                    self._call = hold((args, kwargs))

        hook = self._model.register_forward_pre_hook(remember, with_kwargs=True)
        try:
            with LossMode(self._losses.append):
                yield
        finally:
            hook.remove()

    def losses(self) -> list[LossFact]:
        return self._losses

    def dependence(self) -> Dependence:
        rows, call = self._rows()
        tensors = [x for _, x in tensors_in(call, torch.Tensor) if x.ndim]
        batched = [x for x in tensors if len(x) == rows and x.dtype is not torch.bool]
        if rows < 2 or not batched:
            return "unknown"
        first, again = self._outputs(call, rows), self._outputs(self._arguments(), rows)
        with quiet():
            for each in batched:
                each[-1] = _changed(each[-1])
        other = self._outputs(call, rows)
        if first is None or again is None or other is None:
            return "unknown"
        if not torch.equal(first, again):
            return "random"
        moved = (other - first).abs().flatten(1).amax(1) > _TOLERANCE * first.abs().max()
        if moved[:-1].any():
            return "others"
        return "own" if moved[-1] else "none"

    def _arguments(self) -> Any:
        with quiet():
            return released(self._call)

    def is_random(self) -> bool | None:
        rows, call = self._rows()
        first, again = self._outputs(call, rows), self._outputs(self._arguments(), rows, seed=1)
        if first is None or again is None:
            return None
        return bool(((first - again).abs() > _TOLERANCE * first.abs().max()).any())

    def _rows(self) -> tuple[int, Any]:
        """Return the length of the first tensor of the call, 0 if there is none, and the call."""
        call = None if self._call is None else self._arguments()
        return next((len(x) for _, x in tensors_in(call, torch.Tensor) if x.ndim), 0), call

    def _outputs(self, call: Any, rows: int, seed: int = 0) -> torch.Tensor | None:
        """Return the first output with one row per sample, as float64; None if there is none."""
        if call is None:
            return None
        args, kwargs = call
        with torch.no_grad(), _evaluating(self._model), torch.random.fork_rng():
            torch.manual_seed(seed)
            made = self._model(*args, **kwargs)
        for _, x in tensors_in(made, torch.Tensor):
            if x.ndim and len(x) == rows and x.is_floating_point():
                found = x.detach().to("cpu", torch.float64)
                return found if bool(found.isfinite().all()) else None
        return None

    def workers_alike(self, loader: Any) -> bool | None:
        workers = loader.num_workers
        if workers < 2 or not hasattr(loader.dataset, "__getitem__"):
            return None
        # the same sample twice from every worker, which get turns
        probe = torch.utils.data.DataLoader(
            loader.dataset, batch_size=None, sampler=[0] * (2 * workers), num_workers=workers,
            collate_fn=_as_it_is, worker_init_fn=loader.worker_init_fn,
            generator=copy.deepcopy(loader.generator),
            multiprocessing_context=loader.multiprocessing_context,
        )  # fmt: skip
        drawn = [digest_of(sample) for sample in probe]
        is_random = drawn[0] != drawn[workers]
        return drawn[0] == drawn[1] if is_random else None


class LossMode(TorchFunctionMode):  # type: ignore[misc]  # untyped
    """Reports the loss functions that are called."""

    def __init__(self, report: Callable[[LossFact], None]) -> None:
        self._report = report

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        expected = _EXPECTED.get(function)
        if expected is not None:
            with quiet(), contextlib.suppress(TypeError, ValueError, RuntimeError):
                self._report(expected(function.__name__, result, *args, **kwargs))
        return result


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set a model to evaluation: batch norm mixes rows while it is trained."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def _changed(row: torch.Tensor) -> torch.Tensor:
    """Return other values of a similar size; indices stay in their range."""
    if row.is_floating_point() or row.is_complex():
        return 1 - row
    return torch.where(row > 0, row - 1, row + 1)


def _of_classes(
    name: str, result: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, *args: Any,
    reduction: str = "mean", ignore_index: int = -100, **others: Any,
) -> LossFact:  # fmt: skip
    classes = logits.shape[1 if logits.ndim > 1 else 0]
    used = target.numel() if target.is_floating_point() else int((target != ignore_index).sum())
    value = float(result.sum()) / (used if reduction != "mean" else 1)
    return LossFact(name, value, math.log(classes), is_relative=False)


def _of_bits(
    name: str, result: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, *args: Any,
    reduction: str = "mean", **others: Any,
) -> LossFact:  # fmt: skip
    value = float(result.sum()) / (target.numel() if reduction != "mean" else 1)
    return LossFact(name, value, math.log(2), is_relative=False)


def _of_numbers(
    name: str, result: torch.Tensor, output: torch.Tensor, target: torch.Tensor, *args: Any,
    reduction: str = "mean", **others: Any,
) -> LossFact:  # fmt: skip
    value = float(result.sum()) / (output.numel() if reduction != "mean" else 1)
    size = target.double().abs()
    expected = size.square() if name == "mse_loss" else size
    return LossFact(name, value, float(expected.mean()), is_relative=True)


_EXPECTED: dict[Any, Callable[..., LossFact]] = {
    functional.cross_entropy: _of_classes,
    functional.nll_loss: _of_classes,
    functional.binary_cross_entropy: _of_bits,
    functional.binary_cross_entropy_with_logits: _of_bits,
    functional.mse_loss: _of_numbers,
    functional.l1_loss: _of_numbers,
}


def _as_it_is(sample: Any) -> Any:
    return sample
