"""A torch training program: its state copied and written back bit by bit, and its random states.

Tensors are written back in place and without their version counters, so that whoever holds them
does not notice. `load_state_dict` of an optimizer would convert dtypes.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from tensortap.core import ranks
from tensortap.rooms.track.observing import tensors_in
from tensortap.rooms.track.torch.layouts import like
from tensortap.rooms.track.torch.optimizers import find_optimizers, parameters_of
from tensortap.values.snapshot import digest_of
from tensortap.values.torch.tensors import quiet

_PLAIN = (bool, int, float, str, type(None))


class Kept(NamedTuple):
    """A copy of the arguments of a step, or of everything that a step changes, and its bytes."""

    content: Any
    nbytes: int


class Place(NamedTuple):
    """Address of a part of the state: a module, buffer, parameter, gradient or optimizer slot."""

    kind: str
    name: str
    key: str = ""


def training(model: Any, optimizer: Any, others: tuple[Any, ...]) -> TorchTraining | None:
    """Return a torch program whose steps can be run again; None for other models."""
    is_module = isinstance(model, torch.nn.Module)
    return TorchTraining(model, optimizer, others) if is_module else None


class TorchTraining:
    """A model, its optimizers, and other objects with a ``state_dict``.

    Of the functions that ask other ranks, `agree` and `gather`, every rank has to call each.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, others: tuple[Any, ...]) -> None:
        self._model = model
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        given += [each for each in others if isinstance(each, torch.optim.Optimizer)]
        self._optimizers = [each.optimizer for each in find_optimizers(given) if not each.wraps]
        self._others = tuple(x for x in others if not isinstance(x, torch.optim.Optimizer))
        # programs also draw from generators between steps
        self._generators = [each for each in others if isinstance(each, torch.Generator)]
        self._group: Any = None

    @property
    def rank(self) -> int:
        return ranks.rank_and_world_size()[0]

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if _is_distributed() else 1

    # -- the state ------------------------------------------------------------------------------

    def _places(self) -> Iterator[tuple[Place, Any]]:
        """Yield what a step may change: where it is, and its value."""
        for path, module in self._model.named_modules():
            for name, value in (*module.__dict__.items(), *module._buffers.items()):
                if isinstance(value, (torch.Tensor, *_PLAIN)):
                    yield (
                        Place("buffer" if name in module._buffers else "module", path, name),
                        value,
                    )
        for name, parameter in self._model.named_parameters():
            yield Place("parameter", name), parameter
            yield Place("gradient", name), parameter.grad
        for number, optimizer in enumerate(self._optimizers):
            for index, parameter in enumerate(parameters_of(optimizer)):
                place = Place("optimizer", str(number), str(index))
                yield place, optimizer.state.get(parameter)

    def _owners(self) -> Callable[[Place], Any]:
        """Return a function that finds what holds the value of a place."""
        modules = dict(self._model.named_modules())
        parameters = dict(self._model.named_parameters())
        slots = [list(parameters_of(optimizer)) for optimizer in self._optimizers]

        def owner(place: Place) -> Any:
            kind, name, key = place
            if kind in ("parameter", "gradient"):
                return parameters[name]
            if kind == "optimizer":
                return self._optimizers[int(name)].state, slots[int(name)][int(key)]
            return modules[name]._buffers if kind == "buffer" else modules[name].__dict__

        return owner

    def keep_state(self, instead: Kept | None = None) -> Kept:
        """Copy everything that a step changes, into the memory of a copy that nobody needs."""
        return self._keep(False, None if instead is None else spare_tensors(instead.content[0]))

    def keep_present(self) -> Kept:
        """Do the same, and remember which tensors hold it, to put everything back as it is."""
        return self._keep(True, None)

    def _keep(self, held: bool, spare: Spare | None) -> Kept:
        with quiet():
            places = [(place, hold(value, held, spare)) for place, value in self._places()]
            states = [copy.deepcopy(_state_of(other)) for other in self._others]
        moment = self.keep_moment()
        nbytes = sum(held_nbytes(value) for _, value in places)
        nbytes += sum(x.nbytes for _, x in tensors_in(states, torch.Tensor))
        return Kept((places, states, moment), nbytes)

    def check(self, kept: Kept) -> None:
        """Raise ValueError if the program has no place for a copy: its model has changed."""
        before, now = (dict(map(_form_of, each)) for each in (kept.content[0], self._places()))
        for place in before | now:
            if before.get(place) != now.get(place):
                was, found = (each.get(place, "not there") for each in (before, now))
                raise ValueError(f"the {' '.join(place)} was {was}, and is {found} now")

    def restore(self, kept: Kept) -> None:
        """Write a copy back."""
        places, states, moment = kept.content
        owner = self._owners()
        with quiet():
            for place, value in places:
                _write(owner(place), place, value)
            for other, state in zip(self._others, states, strict=True):
                _load(other, copy.deepcopy(state))
        self.restore_moment(moment)

    # -- moments ---------------------------------------------------------------------------------

    def keep_moment(self) -> Any:
        """Return the random states and the settings of the optimizer: what may change anywhere."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        groups = [
            [{k: v for k, v in group.items() if isinstance(v, (*_PLAIN, tuple))} for group in
             optimizer.param_groups] for optimizer in self._optimizers
        ]  # fmt: skip
        without = not any(p.grad is not None for p in self._model.parameters())
        numbers = np.random.get_state() if "numpy.random" in sys.modules else None  # noqa: NPY002
        drawn = [generator.get_state() for generator in self._generators]
        return random.getstate(), numbers, torch.get_rng_state(), cuda, groups, without, drawn

    def restore_moment(self, moment: Any) -> None:
        python, numbers, cpu, cuda, groups, without, drawn = moment
        random.setstate(python)
        if numbers is not None:
            np.random.set_state(numbers)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        for generator, state in zip(self._generators, drawn, strict=True):
            generator.set_state(state)
        for optimizer, saved in zip(self._optimizers, groups, strict=True):
            for group, settings in zip(optimizer.param_groups, saved, strict=True):
                group.update(settings)
        if without:
            for parameter in self._model.parameters():
                parameter.grad = None

    # -- batches ---------------------------------------------------------------------------------

    def keep_batch(self, batch: Any) -> Kept:
        with quiet():
            kept = hold(batch)
        nbytes = sum(x.nbytes for _, x in tensors_in(batch, (torch.Tensor, np.ndarray)))
        return Kept(kept, nbytes)

    def batch_of(self, kept: Kept) -> Any:
        with quiet():
            return released(kept.content)

    def rows_of(self, kept: Kept) -> int:
        """Return how many rows the batch has; 0 if its tensors do not have the same number."""
        sizes = {len(x) if x.ndim else -1 for _, x in tensors_in(kept.content, torch.Tensor)}
        return sizes.pop() if len(sizes) == 1 and min(sizes) > 0 else 0

    def mixed(self, kept: Kept, other: Kept, rows: frozenset[int]) -> Any:
        """Return the `other` batch with some rows of the first."""
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
        """Return whether the result is not finite or, with `whole`, anything in the state."""
        with quiet():
            if any(_is_bad(x) for _, x in tensors_in(result, (torch.Tensor, float))):
                return True
            return whole and any(
                _is_bad(tensor)
                for place, value in self._places()
                if place.kind in ("parameter", "gradient")
                for _, tensor in tensors_in(value, torch.Tensor)
            )

    def digest_of(self, result: Any) -> bytes:
        with quiet():
            parts = [digest_of(local(x)) for _, x in tensors_in(result, torch.Tensor)]
            parts += [digest_of(x) for _, x in tensors_in(result, float)]
        return b"".join(parts)

    # -- ranks ---------------------------------------------------------------------------------

    def _own_group(self) -> Any:
        """Return a group of all ranks, apart from those of the user; every rank makes it."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def agree(self, *flags: bool) -> list[bool]:
        """Return which flags are set on any rank."""
        if not _is_distributed():
            return list(flags)
        with quiet():
            shared = torch.tensor([float(flag) for flag in flags])
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._own_group())
            return [bool(flag) for flag in shared.tolist()]

    def gather(self, value: str) -> list[str]:
        """Return the texts of all ranks, by rank."""
        if not _is_distributed():
            return [value]
        found: list[Any] = [None] * self.world_size
        with quiet():
            dist.all_gather_object(found, value, group=self._own_group())
        return found


def _is_distributed() -> bool:
    ready = dist.is_available() and dist.is_initialized()
    return bool(ready and dist.get_world_size() > 1)


# -- values -------------------------------------------------------------------------------------


def _form_of(item: tuple[Place, Any]) -> tuple[tuple[str, ...], str]:
    """Return what must not change about a place, and its form: the shape of a parameter."""
    (kind, name, key), value = item
    if kind == "parameter":
        held = value.copy if isinstance(value, HeldTensor) else local(value)
        return (kind, name), f"of shape {tuple(held.shape)}"
    return (kind, name, key) if kind == "optimizer" else ("module", name), "there"


def _is_bad(value: Any) -> bool:
    if isinstance(value, float):
        return not np.isfinite(value)
    value = local(value)
    is_float = value.is_floating_point() or value.is_complex()
    return bool(is_float and not torch.isfinite(value).all())


def _filled(kept: HeldTensor, present: Any, parameter: Any = None) -> torch.Tensor:
    """Return the tensor that held the copy, or the present one, with the bits of the copy.

    If there is none, it is made; of a distributed tensor with the layout of its parameter.
    """
    target = kept.holder if kept.holder is not None else present
    same = isinstance(target, torch.Tensor) and (
        local(target).shape == kept.copy.shape and target.dtype == kept.copy.dtype
    )
    if not same:
        made = kept.copy.to(kept.device, copy=True)
        if not kept.distributed:
            return made
        if parameter is None or local(parameter).shape != made.shape:
            raise ValueError("a distributed tensor of the state has no parameter of its layout")
        distributed: torch.Tensor = like(parameter, made, dtype=made.dtype)
        return distributed
    local(target).data.copy_(kept.copy)
    return target


def _write(owner: Any, place: Place, kept: Any) -> None:
    if place.kind == "parameter":
        _filled(kept, owner)
    elif place.kind == "gradient":
        owner.grad = None if kept is None else _filled(kept, owner.grad, owner)
    elif place.kind == "optimizer":
        state, parameter = owner
        if kept is None:
            state.pop(parameter, None)
            return
        present = state.setdefault(parameter, {})
        for name in [name for name in present if name not in kept]:
            del present[name]
        for name, item in kept.items():
            present[name] = _rebuilt(item, present.get(name), parameter)
    else:
        owner[place.key] = _rebuilt(kept, owner.get(place.key))


def _rebuilt(kept: Any, present: Any, parameter: Any = None) -> Any:
    return _filled(kept, present, parameter) if isinstance(kept, HeldTensor) else released(kept)


def _state_of(other: Any) -> Any:
    return other.state_dict() if hasattr(other, "state_dict") else other.get_state()


def _load(other: Any, state: Any) -> None:
    if hasattr(other, "load_state_dict"):
        other.load_state_dict(state)
    else:
        other.set_state(state)


# -- copies in the memory of the host, inside the containers that held them -----------------------

# arguments that a step works with, not on: a copy of a model would be trained in its place
_SHARED = (
    torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.DataLoader, torch.Generator,
)  # fmt: skip


class HeldTensor(NamedTuple):
    """A copy of a tensor and where it was; `holder` is the tensor itself, to write back into it.

    Of a distributed tensor it is this rank's part.
    """

    copy: torch.Tensor
    device: torch.device
    holder: torch.Tensor | None = None
    distributed: bool = False
    requires_grad: bool = False


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a distributed tensor that this rank has, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


Spare = dict[tuple[Any, ...], list[torch.Tensor]]


def spare_tensors(value: Any) -> Spare:
    """Return the copies in a value that nobody needs any more, for `hold` to fill again."""
    found: Spare = {}
    for _, held in tensors_in(value, HeldTensor):
        if held.copy.layout is torch.strided:
            found.setdefault(_form(held.copy), []).append(held.copy)
    return found


def hold(value: Any, holders: bool = False, spare: Spare | None = None) -> Any:
    """Return a copy of a value with a `HeldTensor` in place of each tensor."""

    def take(tensor: Any) -> HeldTensor:
        content = local(tensor).detach()
        known = spare.get(_form(content)) if spare and content.layout is torch.strided else None
        # memory that was written before takes a fourth of the time
        copied = known.pop().copy_(content) if known else content.to("cpu", copy=True)
        holder = tensor if holders else None
        is_distributed = hasattr(tensor, "to_local")
        return HeldTensor(copied, tensor.device, holder, is_distributed, tensor.requires_grad)

    return map_tensors(value, torch.Tensor, take)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def released(value: Any) -> Any:
    """Return fresh copies of what is held, on the devices where it was."""

    def take(held: HeldTensor) -> torch.Tensor:
        tensor = held.copy.to(held.device, copy=True)
        return tensor.requires_grad_() if held.requires_grad else tensor

    return map_tensors(value, HeldTensor, take)


def held_nbytes(value: Any) -> int:
    return sum(held.copy.nbytes for _, held in tensors_in(value, HeldTensor))


def map_tensors(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return copies of dicts, lists and tuples around what `function` makes of each tensor."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        copied = copy.copy(value)  # a defaultdict has more than its items
        copied.update((key, map_tensors(item, kind, function)) for key, item in value.items())
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, kind, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, kind, function) for item in value)
    return _copied(value)


def _copied(value: Any) -> Any:
    """Return a copy of a value without tensors; the program's own objects as they are."""
    if isinstance(value, _SHARED):
        return value
    if isinstance(value, Iterator):
        raise TypeError(
            f"a {type(value).__name__} cannot be read twice: pass the batch itself to the step"
        )
    return copy.deepcopy(value)
