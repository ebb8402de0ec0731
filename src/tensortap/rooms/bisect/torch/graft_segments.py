"""Modules that compute the gradient of a tensor, found in the graph of the backward pass.

The graph falls into segments: from the output of a module back to its inputs and to the outputs
of the modules in it, and from the inputs of a module back to whatever they were computed from,
which is code of the module around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tensortap.rooms.bisect.grafting import CallSite
from tensortap.values.torch import private


class GraftedCall:
    """A call of a module that has not returned."""

    def __init__(self, site: CallSite) -> None:
        self.site = site
        self.random = False  # whether it has drawn random numbers itself
        self.certain = True  # whether all its inputs are as in the reference
        self.inputs: set[Any] = set()  # the nodes that its inputs were computed by
        self._versions: dict[int, int] = {}

    def read(self, tensor: torch.Tensor) -> None:
        """Take a tensor that the module is called with."""
        if tensor.grad_fn is not None:
            self.inputs.add(tensor.grad_fn)
        self._versions[id(tensor)] = private.version_of(tensor)

    def changed(self, tensor: torch.Tensor) -> bool:
        """Return whether the module has changed one of its inputs in place."""
        version = private.version_of(tensor)
        return self._versions.get(id(tensor), version) != version


class Segments:
    """The segments of one step."""

    def __init__(self) -> None:
        self._calls: dict[CallSite, GraftedCall] = {}
        self._outputs: dict[Any, list[tuple[GraftedCall, Any]]] = {}  # by node: what computed it
        self._readers: dict[Any, dict[str, bool]] | None = None

    def add(self, call: GraftedCall, start: Any, node: Any) -> None:
        """Take an output of a module, computed by `start`; `node` is what others read.

        Both are the same if the module has changed its input in place.
        """
        self._calls[call.site] = call
        self._outputs.setdefault(node, []).append((call, start))
        self._readers = None

    def readers(self, node: Any, site: CallSite) -> tuple[str, ...]:
        """Return the modules whose backward computes the gradient of an output.

        If some of them have functions with a backward of their own, only those: torch computes
        the others. Empty for code after the model.
        """
        if self._readers is None:
            self._readers = {}
            for own, found in self._outputs.items():
                for call, start in found:
                    self._follow(call, start, in_place=start is own)
        readers = self._readers.get(node, {})
        if not readers and site.parent is not None:
            return (site.parent.module,)
        return tuple([name for name, custom in readers.items() if custom] or readers)

    def cut_by(self, node: Any, site: CallSite, missing: set[Any]) -> tuple[str, ...]:
        """Return who keeps the gradient of an output from being computed; empty if it follows.

        That is a module that reads the output and whose own gradient has come, or else the code
        around it. If the gradients of the modules that read it are missing, theirs explain it.
        """
        ends = {node}
        own = {
            each for each, found in self._outputs.items() if any(c.site == site for c, _ in found)
        }
        readers: dict[str, bool] = {}
        for output, found in self._outputs.items():
            for call, _ in found:
                if output not in own and node in self._reached(call.inputs, ends):
                    readers[call.site.module] = output in missing
        if any(readers.values()):
            return ()
        around = site.parent.module if site.parent is not None else ""
        return tuple(readers) or ((around,) if around else ())

    def _reached(self, seeds: Iterable[Any], ends: set[Any]) -> set[Any]:
        return self._walk(seeds, ends)[0]

    def _follow(self, call: GraftedCall, start: Any, in_place: bool) -> None:
        """Note a module as a reader of all that an output of it was computed from."""
        seeds = _next(start) if in_place else [start]
        reached, computes, custom = self._walk(seeds, call.inputs)
        if not computes and not in_place:  # it hands on what it got
            return
        readers = {call.site.module: custom or (in_place and _is_custom(start))}
        self._note(readers, reached)
        for node in reached - self._outputs.keys():
            self._follow_input(call, node, readers)

    def _follow_input(self, call: GraftedCall, node: Any, readers: dict[str, bool]) -> None:
        """Note the readers of an input, and the module around it, whose code computed it."""
        parent = call.site.parent
        around = None if parent is None else self._calls.get(parent)
        if parent is None or around is None:
            return
        if node in around.inputs:  # handed on as it came
            self._follow_input(around, node, readers)
            return
        reached, _, custom = self._walk(_next(node), around.inputs)
        readers = {parent.module: custom or _is_custom(node), **readers}
        self._note(readers, reached)
        for end in reached - self._outputs.keys():
            self._follow_input(around, end, readers)

    def _walk(self, seeds: Iterable[Any], ends: set[Any]) -> tuple[set[Any], bool, bool]:
        """Return the outputs and ends that are reached, whether anything lies before them, and
        whether a function there has a backward of its own."""
        reached: set[Any] = set()
        seen: set[Any] = set()
        pending = list(seeds)
        while pending:
            node = pending.pop()
            if node in ends or node in self._outputs:
                reached.add(node)
            elif node not in seen:
                seen.add(node)
                pending += _next(node)
        return reached, bool(seen), any(map(_is_custom, seen))

    def _note(self, readers: dict[str, bool], nodes: set[Any]) -> None:
        assert self._readers is not None
        for node in nodes & self._outputs.keys():
            known = self._readers.setdefault(node, {})
            for name, custom in readers.items():
                known[name] = known.get(name, False) or custom


def _next(node: Any) -> Iterator[Any]:
    return (each for each, _ in node.next_functions if each is not None)


def _is_custom(node: Any) -> bool:
    """Return whether a node is a function whose backward the user has written."""
    is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    return is_python and type(node).__name__ != "StraightBackward"
