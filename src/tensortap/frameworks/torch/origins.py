"""Where non-finite values arise: in a module, or in the code between two modules.

A module whose input is not finite already did not make the NaN. Forward, inputs are looked at only
when an output is not finite, so this costs nothing before. Backward, the gradient of an input that
is no module's output is checked on the CPU as it passes.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import torch

from tensortap.frameworks.observing import tensors_in
from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.hidden import hide_from_compiler
from tensortap.frameworks.torch.names import Names
from tensortap.frameworks.torch.shards import local_part
from tensortap.frameworks.torch.tensors import quiet
from tensortap.record import Summary


class TensorUses(NamedTuple):
    """A tensor of this step, and the names of the modules that were called with it."""

    tensor: Any  # a weak reference
    names: list[str]


class Origins:
    """Finds out for the first non-finite tensor of a pass where it was made."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)  # hooks on outputs that the model keeps refer to this
        self._uses: dict[int, TensorUses] = {}
        self._last_output = ""
        self._last_memory = 0  # address of the last output
        self._explained: int | None = None  # the step whose first NaN has been explained
        self._bad_inputs: tuple[int, list[str]] = (-1, [])  # of which backward pass

    def end_step(self) -> None:
        """Forget the tensors of the step."""
        self._uses.clear()
        self._last_output = ""

    # -- the forward pass ------------------------------------------------------------------

    def called(self, name: str, inputs: Any) -> None:
        """Note the tensors that a module was called with."""
        for _, tensor in tensors_in(inputs, torch.Tensor):
            if tensor.requires_grad and not tensor.is_leaf and tensor.is_cpu:
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

    def passed(self, name: str, output: Any) -> None:
        """Note that a module has returned."""
        self._last_output = name
        plain = type(output) is torch.Tensor and output.is_cpu
        self._last_memory = output.data_ptr() if plain else 0

    def of_output(
        self, name: str, cls: str, step: int, inputs: Any, stats: Summary
    ) -> dict[str, str]:
        """Return tags that say where the values of an output that is not finite were made."""
        if self._explained == step:
            return {}
        if stats.nans or stats.posinfs:  # -Inf alone may be a mask
            self._explained = step
        found = _worst(inputs, self._last_memory)
        last = self._last_output
        if not found or found == "-Inf":
            where = "its input had -Inf, as masks do" if found else "its input was finite"
            if last.startswith(f"{name}."):
                where += f": made in {cls.rpartition('.')[2]}.forward, after {last}"
            return {"origin": name, "where": where}
        root = self._root()
        modules = () if root is None else Names(root).modules()
        names = {id(module): path for path, module in modules}
        target = name
        calls = private.module_calls()
        for call, outer in itertools.pairwise(calls):
            enclosing = names.get(id(outer.module), type(outer.module).__name__)
            if not _worst(outer.inputs):
                between = f"between {last} and {target}" if last else f"before {target}"
                where = f"its input was {found} already, made in {call.caller}, {between}"
                return {"origin": enclosing, "where": where}
            target = enclosing
        return {"origin": target, "where": f"the input of {target} was {found}: check the batch"}

    # -- the backward pass -----------------------------------------------------------------

    def of_gradient(self, uses: list[str]) -> dict[str, str]:
        """Return a tag with the modules whose backward pass made a gradient not finite.

        It is empty if code between modules did. `uses` are the modules that took the output.
        """
        this_pass, names = self._bad_inputs
        names = names if this_pass == private.backward_pass() else uses
        inner = [n for n in dict.fromkeys(names) if not any(o.startswith(f"{n}.") for o in names)]
        return {"behind": " ".join(inner)}

    def _check_gradient(self, tensor: torch.Tensor, names: list[str]) -> None:
        """Note if the gradient of a module's input is the first that is not finite."""

        def on_gradient(gradient: torch.Tensor | None) -> None:
            this_pass = private.backward_pass()
            if gradient is None or self._bad_inputs[0] == this_pass:
                return
            if _worst(gradient) not in ("", "-Inf"):
                self._bad_inputs = this_pass, names

        hide_from_compiler(on_gradient)
        tensor.register_hook(torch.utils.hooks.unserializable_hook(on_gradient))


def _worst(value: Any, known: int = 0) -> str:
    """Return ``"NaN"``, ``"Inf"`` or ``"-Inf"`` if tensors contain it, else an empty text.

    A tensor at the address `known` was finite, whatever has overwritten it.
    """
    found = ""
    with quiet():
        for _, tensor in tensors_in(value, torch.Tensor):
            if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_nested:
                continue
            local = local_part(tensor)
            if (known and local.data_ptr() == known) or bool(local.sum().isfinite()):
                continue
            if bool(local.isnan().any()):
                return "NaN"
            infinite = local[local.isinf()]
            if infinite.numel():
                negative = not local.is_complex() and bool((infinite < 0).all())
                found = found if negative and found else "-Inf" if negative else "Inf"
    return found
