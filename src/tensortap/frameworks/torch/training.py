"""A torch training program: its state copied and written back bit by bit, and its random states.

Tensors are written back in place and without their version counters, so that whoever holds them
does not notice. `load_state_dict` of an optimizer would convert dtypes.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from xxhash import xxh3_128

from tensortap import ranks
from tensortap.frameworks.observing import tensors_in
from tensortap.frameworks.replaying import KeptBatch, KeptState, Training
from tensortap.frameworks.snapshot import digest_of
from tensortap.frameworks.torch.optimizers import find_optimizers, parameters_of
from tensortap.frameworks.torch.tensors import quiet

_PLAIN = (bool, int, float, str, type(None))


class HeldTensor(NamedTuple):
    """A copy of a tensor in the memory of the host; `holder` is the tensor that it came from."""

    copy: torch.Tensor
    holder: torch.Tensor | None = None


class TorchTraining(Training):
    """A model, its optimizers, and other objects with a ``state_dict``."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, others: tuple[Any, ...]) -> None:
        self._model = model
        self._optimizers = [each.optimizer for each in find_optimizers(optimizer) if not each.wraps]
        self._others = others
        self._group: Any = None
        self.rank, self.world_size = ranks.rank_and_world_size()
        self.world_size = dist.get_world_size() if _is_distributed() else 1

    # -- the state ------------------------------------------------------------------------------

    def _places(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield what a step may change: the container or object, the key in it, and the value."""
        for module in self._model.modules():
            for name, value in (*module.__dict__.items(), *module._buffers.items()):
                if isinstance(value, (torch.Tensor, *_PLAIN)):
                    table = module._buffers if name in module._buffers else module.__dict__
                    yield table, name, value
        for parameter in self._model.parameters():
            yield _Itself(parameter), "data", parameter
            yield _Gradient(parameter), "grad", parameter.grad
        for optimizer in self._optimizers:
            for parameter in parameters_of(optimizer):
                yield _Slot(optimizer.state, parameter), None, optimizer.state.get(parameter)

    def keep_state(self) -> KeptState:
        return self._keep(held=False)

    def keep_present(self) -> KeptState:
        return self._keep(held=True)

    def _keep(self, held: bool) -> KeptState:
        with quiet():
            places = [(owner, key, _copied(value, held)) for owner, key, value in self._places()]
            states = [copy.deepcopy(_state_of(other)) for other in self._others]
        moment = self.keep_moment()
        nbytes = sum(_nbytes(value) for _, _, value in places)
        return KeptState((places, states, moment), nbytes)

    def restore(self, kept: KeptState) -> None:
        places, states, moment = kept.content
        with quiet():
            for owner, key, value in places:
                _write(owner, key, value)
            for other, state in zip(self._others, states, strict=True):
                _load(other, copy.deepcopy(state))
        self.restore_moment(moment)

    def digest(self) -> bytes:
        hasher = xxh3_128()
        with quiet():
            for _, _, value in self._places():
                for _, tensor in tensors_in(value, torch.Tensor):
                    hasher.update(digest_of(_local(tensor)))
        return hasher.digest()

    # -- moments ---------------------------------------------------------------------------------

    def keep_moment(self) -> Any:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        groups = [
            [{k: v for k, v in group.items() if isinstance(v, (*_PLAIN, tuple))} for group in
             optimizer.param_groups] for optimizer in self._optimizers
        ]  # fmt: skip
        without = not any(p.grad is not None for p in self._model.parameters())
        numbers = np.random.get_state() if "numpy.random" in sys.modules else None  # noqa: NPY002
        return random.getstate(), numbers, torch.get_rng_state(), cuda, groups, without

    def restore_moment(self, moment: Any) -> None:
        python, numbers, cpu, cuda, groups, without = moment
        random.setstate(python)
        if numbers is not None:
            np.random.set_state(numbers)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        for optimizer, saved in zip(self._optimizers, groups, strict=True):
            for group, settings in zip(optimizer.param_groups, saved, strict=True):
                group.update(settings)
        if without:
            for parameter in self._model.parameters():
                parameter.grad = None

    # -- batches ---------------------------------------------------------------------------------

    def keep_batch(self, batch: Any) -> KeptBatch:
        with quiet():
            kept = _map(batch, lambda x: (x.detach().to("cpu", copy=True), x.device))
        nbytes = sum(x.nbytes for _, x in tensors_in(batch, (torch.Tensor, np.ndarray)))
        return KeptBatch(kept, nbytes)

    def batch_of(self, kept: KeptBatch) -> Any:
        with quiet():
            return _unmap(kept.content)

    def rows_of(self, kept: KeptBatch) -> int:
        sizes = {len(x) if x.ndim else -1 for _, x in tensors_in(kept.content, torch.Tensor)}
        return sizes.pop() if len(sizes) == 1 and min(sizes) > 0 else 0

    def mixed(self, kept: KeptBatch, other: KeptBatch, rows: frozenset[int]) -> Any:
        args = self.batch_of(other)
        pairs = zip(
            tensors_in(kept.content, torch.Tensor), tensors_in(args, torch.Tensor), strict=True
        )
        chosen = sorted(rows)
        with quiet():
            for (_, bad), (_, good) in pairs:
                if bad.shape != good.shape:
                    raise ValueError("the batches have different shapes")
                good[chosen] = bad[chosen].to(good.device)
        return args

    # -- judging ---------------------------------------------------------------------------------

    def is_bad(self, result: Any, whole: bool) -> bool:
        with quiet():
            if any(_is_bad(x) for _, x in tensors_in(result, (torch.Tensor, float))):
                return True
            return whole and any(
                _is_bad(tensor)
                for owner, _, value in self._places()
                if isinstance(owner, (_Itself, _Gradient))
                for _, tensor in tensors_in(value, torch.Tensor)
            )

    def digest_of(self, result: Any) -> bytes:
        with quiet():
            parts = [digest_of(_local(x)) for _, x in tensors_in(result, torch.Tensor)]
            parts += [digest_of(x) for _, x in tensors_in(result, float)]
        return b"".join(parts)

    # -- ranks ---------------------------------------------------------------------------------

    def _own_group(self) -> Any:
        """Return a group of all ranks, apart from those of the user; every rank makes it."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def agree(self, flag: bool) -> bool:
        if not _is_distributed():
            return flag
        with quiet():
            shared = torch.tensor([float(flag)])
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._own_group())
            return bool(shared.item())

    def gather(self, value: str) -> list[str]:
        if not _is_distributed():
            return [value]
        found: list[Any] = [None] * self.world_size
        with quiet():
            dist.all_gather_object(found, value, group=self._own_group())
        return found


def _is_distributed() -> bool:
    ready = dist.is_available() and dist.is_initialized()
    return bool(ready and dist.get_world_size() > 1)


class _Itself(NamedTuple):
    tensor: torch.Tensor


class _Gradient(NamedTuple):
    parameter: torch.Tensor


class _Slot(NamedTuple):
    state: dict[Any, Any]
    parameter: torch.Tensor


# -- values -------------------------------------------------------------------------------------


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a distributed tensor that this rank has, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_bad(value: Any) -> bool:
    if isinstance(value, float):
        return not np.isfinite(value)
    value = _local(value)
    is_float = value.is_floating_point() or value.is_complex()
    return bool(is_float and not torch.isfinite(value).all())


def _copied(value: Any, held: bool) -> Any:
    if isinstance(value, torch.Tensor):
        content = _local(value).detach().to("cpu", copy=True)
        return HeldTensor(content, value if held else None)
    if isinstance(value, dict):
        return {key: _copied(item, held) for key, item in value.items()}
    return copy.deepcopy(value)


def _nbytes(value: Any) -> int:
    if isinstance(value, HeldTensor):
        return int(value.copy.nbytes)
    return sum(map(_nbytes, value.values())) if isinstance(value, dict) else 0


def _filled(kept: HeldTensor, present: Any) -> torch.Tensor:
    """Return the tensor that held the copy, or the present one, with the bits of the copy."""
    target = kept.holder if kept.holder is not None else present
    same = isinstance(target, torch.Tensor) and (
        _local(target).shape == kept.copy.shape and target.dtype == kept.copy.dtype
    )
    if not same:
        return kept.copy.clone()
    _local(target).data.copy_(kept.copy)
    return target


def _write(owner: Any, key: Any, kept: Any) -> None:
    if isinstance(owner, _Itself):
        _filled(kept, owner.tensor)
    elif isinstance(owner, _Gradient):
        gradient = owner.parameter.grad
        owner.parameter.grad = None if kept is None else _filled(kept, gradient)
    elif isinstance(owner, _Slot):
        if kept is None:
            owner.state.pop(owner.parameter, None)
            return
        present = owner.state.setdefault(owner.parameter, {})
        for name in [name for name in present if name not in kept]:
            del present[name]
        for name, item in kept.items():
            present[name] = _rebuilt(item, present.get(name))
    else:
        owner[key] = _rebuilt(kept, owner.get(key))


def _rebuilt(kept: Any, present: Any) -> Any:
    return _filled(kept, present) if isinstance(kept, HeldTensor) else copy.deepcopy(kept)


def _state_of(other: Any) -> Any:
    return other.state_dict() if hasattr(other, "state_dict") else other.get_state()


def _load(other: Any, state: Any) -> None:
    if hasattr(other, "load_state_dict"):
        other.load_state_dict(state)
    else:
        other.set_state(state)


def _map(value: Any, function: Any) -> Any:
    """Return a tree with what `function` returns for each tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)((key, _map(item, function)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in value)
    return copy.deepcopy(value)


def _unmap(value: Any) -> Any:
    """Return a tree with fresh tensors for the pairs of copies and devices in it."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.device):
        return value[0].to(value[1], copy=True)
    if isinstance(value, dict):
        return type(value)((key, _unmap(item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_unmap, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unmap, value))
    return copy.deepcopy(value)
