"""Find where non-finite values arise: in a module, or in the code between two modules.

A module whose input is not finite already did not make the NaN. On the CPU, inputs are looked at
only when an output is not finite, so this costs nothing before. On a device that is known too late:
the range of an input that is no module's output is computed there, and read after a NaN. Backward,
the gradient of such an input is looked at as it passes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from tensortap.core.record import Summary
from tensortap.rooms.track.observing import Explain, tensors_in
from tensortap.rooms.track.torch import internals
from tensortap.rooms.track.torch.hooks import BreakingHook
from tensortap.rooms.track.torch.layouts import local_part
from tensortap.rooms.track.torch.names import Names, unwrapped
from tensortap.rooms.track.torch.reading import is_plain
from tensortap.values.torch import private
from tensortap.values.torch.tensors import quiet

# what tensors contain: NaN, Inf, -Inf or nothing of these; on a device, their ranges
Evidence = str | list[torch.Tensor]


class TensorUses(NamedTuple):
    """A tensor of this step, and the names of the modules that were called with it."""

    tensor: Any  # a weak reference
    names: list[str]


class TensorRange(NamedTuple):
    """A tensor on a device, its version, and its range; None if it was observed as an output."""

    tensor: Any  # a weak reference
    version: int
    range: torch.Tensor | None


class Origins:
    """Finds out for the first non-finite tensor of a pass where it was made."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)  # hooks on outputs that the model keeps refer to this
        self._uses: dict[int, TensorUses] = {}
        self._ranges: dict[int, TensorRange] = {}
        self._last_output = ""
        self._last_memory = 0  # address of the last output
        self._explained: int | None = None  # the step whose first NaN has been explained
        self._bad_inputs: tuple[int, list[str]] = (-1, [])  # of which backward pass
        # the ranges of gradients of inputs: of which backward pass, and who took the inputs
        self._gradients: list[tuple[int, list[str], torch.Tensor]] = []

    def end_step(self) -> None:
        """Forget the tensors of the step."""
        self._uses.clear()
        self._ranges.clear()
        self._gradients = []  # another list: what is explained later has the old one
        self._last_output = ""

    # -- the forward pass ------------------------------------------------------------------

    def called(self, name: str, inputs: Any) -> None:
        """Note the tensors that a module was called with."""
        for _, tensor in tensors_in(inputs, torch.Tensor):
            if tensor.requires_grad and not tensor.is_leaf and (tensor.is_cpu or on_device(tensor)):
                known = self._uses.get(id(tensor))
                names = self.uses(tensor)
                if known is None or known.names is not names:  # no output that is observed
                    self._check_gradient(tensor, names)
                names.append(name)

    def uses(self, tensor: torch.Tensor) -> list[str]:
        """Return the list of modules that are called with a tensor, which grows as they are."""
        known = self._uses.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            known = self._uses[id(tensor)] = TensorUses(weakref.ref(tensor), [])
        return known.names

    def passed(self, name: str, output: Any, observed: bool) -> None:
        """Note that a module has returned, and whether its output was observed."""
        self._last_output = name
        self._last_memory = _address(output)
        for _, tensor in tensors_in(output, torch.Tensor) if observed else ():
            if on_device(tensor):
                version = private.version_of(tensor)
                self._ranges[id(tensor)] = TensorRange(weakref.ref(tensor), version, None)

    def of_output(
        self, name: str, cls: str, step: int, inputs: Any, output: Any, tensor: torch.Tensor
    ) -> Explain:
        """Return what finds tags that say where a tensor of an output became non-finite."""
        # a module that overwrites its input has destroyed it, but the last output was finite
        known = self._last_memory if self._last_memory == _address(output) else 0
        if on_device(tensor):
            tell = self._gather(name, cls, inputs, functools.partial(self._ranges_of, known=known))
            # of a mask, which has -Inf in every step, reading would wait for the device each time
            return lambda stats: self._tell(step, tell, stats) if _is_bad(stats) else {}

        def explain(stats: Summary) -> dict[str, str]:
            if self._explained == step:
                return {}
            look = functools.partial(_worst, known=known)
            return self._tell(step, self._gather(name, cls, inputs, look), stats)

        return explain

    def _gather(self, name: str, cls: str, inputs: Any, look: Any) -> Any:
        """Return a function of nothing that tells where an output was made, without the tensors."""
        own: Evidence = look(inputs)
        calls = internals.module_calls() if own else []
        outer = [
            (weakref.ref(above.module), call.caller, look(above.inputs))
            for call, above in itertools.pairwise(calls)
        ]
        return functools.partial(self._origin, name, cls, self._last_output, own, outer)

    def _origin(
        self, name: str, cls: str, last: str, own: Evidence, outer: list[tuple[Any, str, Evidence]]
    ) -> dict[str, str]:
        """Return the tags of an output of which these are the inputs, its own and those around."""
        model = self._root()
        named = () if model is None else tuple(Names(model).modules())
        names, modules = {id(module): path for path, module in named}, [each for _, each in named]
        root_name = "" if model is None else names.get(id(unwrapped(model)))
        inside = last.startswith(f"{name}.") or (last and name == root_name)
        made = f": made in {cls.rpartition('.')[2]}.forward, after {last}" if inside else ""
        found = _read(own)
        if found in ("", "-Inf"):
            where = "its input had -Inf, as masks do" if found else "its input was finite"
            module = next((each for each in modules if names[id(each)] == name), None)
            bad = {"weights": _bad_weights(name, module)}
            return {"origin": name, "where": where + made} | (bad if bad["weights"] else {})
        target = name
        for module, caller, evidence in outer:
            around = unwrapped(module())
            this = names.get(id(around), type(around).__name__)
            if this == target:  # a wrapper
                continue
            if _read(evidence) in ("", "-Inf"):  # or a mask, which goes through all layers
                inner = not last or last.startswith(f"{target}.")
                between = f"before {target}" if inner else f"between {last} and {target}"
                where = f"its input was {found} already, made in {caller}, {between}"
                return {"origin": this, "where": where}
            target = this
        return {"origin": target, "where": f"the input of {target} was {found}: check the batch"}

    def _tell(self, step: int, tell: Any, stats: Summary) -> dict[str, str]:
        """Return the tags of the first output of a step that is not finite."""
        if self._explained == step:
            return {}
        if _is_bad(stats):
            self._explained = step
        found: dict[str, str] = tell()
        return found

    def _ranges_of(self, value: Any, known: int = 0) -> list[torch.Tensor]:
        """Return the ranges of tensors on a device that were observed as no module's output."""
        found = []
        for _, tensor in tensors_in(value, torch.Tensor):
            if not on_device(tensor) or (known and tensor.data_ptr() == known):
                continue
            seen, version = self._ranges.get(id(tensor)), private.version_of(tensor)
            if seen is None or seen.tensor() is not tensor or seen.version != version:
                extent = _range(tensor)
                if extent is None:
                    continue
                seen = TensorRange(weakref.ref(tensor), version, extent)
                self._ranges[id(tensor)] = seen
            if seen.range is not None:
                found.append(seen.range)
        return found

    # -- the backward pass -----------------------------------------------------------------

    def of_gradient(self, uses: list[str], gradient: torch.Tensor) -> Explain:
        """Return what finds a tag with the modules whose backward pass made a gradient non-finite.

        It is empty if code between modules did. `uses` are the modules that took the output.
        """
        this_pass = private.backward_pass()
        if on_device(gradient):
            passed, count = self._gradients, len(self._gradients)
            bad = (
                names
                for number, names, extent in itertools.islice(passed, count)
                if number == this_pass and _read([extent]) not in ("", "-Inf")
            )
            return lambda stats: self._behind(next(bad, uses))
        bad_pass, names = self._bad_inputs
        return lambda stats: self._behind(names if this_pass == bad_pass else uses)

    def _behind(self, names: Iterable[str]) -> dict[str, str]:
        """Return the tag of a gradient with the inner modules whose backward pass made it.

        For code between modules, it is empty, and `origin` is the model itself.
        """
        names, model = list(dict.fromkeys(names)), self._root()
        if not names and model is not None:
            return {"behind": "", "origin": next(Names(model).modules())[0]}
        inner = [n for n in names if not any(other.startswith(f"{n}.") for other in names)]
        return {"behind": " ".join(inner)}

    def _check_gradient(self, tensor: torch.Tensor, names: list[str]) -> None:
        """Look at the gradient of a module's input when it is computed."""

        def on_gradient(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                self._note_gradient(gradient, names)

        hook = BreakingHook(on_gradient, lambda reason: None)
        tensor.register_hook(torch.utils.hooks.unserializable_hook(hook))

    def _note_gradient(self, gradient: torch.Tensor, names: list[str]) -> None:
        """Note who took an input if its gradient is the first that is not finite."""
        this_pass = private.backward_pass()
        if self._bad_inputs[0] == this_pass:
            return
        if on_device(gradient):
            extent = _range(gradient)
            if extent is not None:
                self._gradients.append((this_pass, names, extent))
        elif _worst(gradient) not in ("", "-Inf"):
            self._bad_inputs = this_pass, names


def on_device(tensor: torch.Tensor) -> bool:
    """Return whether statistics of a tensor are known only later."""
    return bool(tensor.is_cuda)


def _address(output: Any) -> int:
    """Return the address of an output that is one plain tensor; 0 for any other."""
    if type(output) is torch.Tensor and (output.is_cpu or output.is_cuda):
        with contextlib.suppress(RuntimeError):  # inside torch.func it has none
            return int(output.data_ptr())
    return 0


def _is_bad(stats: Summary) -> bool:
    return bool(stats.nans or stats.posinfs)  # -Inf alone may be a mask


def _range(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the smallest and the largest value of a tensor, both NaN if it has one, on its device.

    Nothing waits for the device. None for a tensor without values, or one still being gathered.
    """
    is_real = (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_nested
    if not is_real or internals.running_collective(tensor) is not None:
        return None
    with quiet():
        local = local_part(tensor).detach()
        local = torch.view_as_real(local) if local.is_complex() else local
        local = local.float() if local.element_size() == 1 else local
        return torch.stack(torch.aminmax(local)) if local.numel() else None


def _read(evidence: Evidence) -> str:
    """Return what tensors contain; where that is on a device, wait for it."""
    if isinstance(evidence, str):
        return evidence
    words = ["", "-Inf", "Inf", "NaN"]
    worst = 0
    for extent in evidence:
        low, high = extent.tolist()
        worst = max(worst, 3 if math.isnan(low) else 2 if high == math.inf else low == -math.inf)
    return words[worst]


def _worst(value: Any, known: int = 0) -> str:
    """Return ``"NaN"``, ``"Inf"`` or ``"-Inf"`` if tensors contain it, else an empty text.

    A tensor at the address `known` was finite, whatever has overwritten it.
    """
    tensors = [tensor for _, tensor in tensors_in(value, torch.Tensor)]
    with quiet():
        extents = [
            _range(tensor)
            for tensor in tensors
            if not (known and _address(local_part(tensor)) == known)
        ]
    return _read([extent for extent in extents if extent is not None])


def _bad_weights(name: str, module: torch.nn.Module | None) -> str:
    """Return the parameters of a module, in memory, that are not finite."""
    own = [] if module is None else list(module.named_parameters(recurse=False))
    bad = [key for key, each in own if is_plain(each) and not torch.isfinite(each).all()]
    return ", ".join(f"{name}.{key}" for key in bad)
