"""Statistics inside CUDA graphs: reduced on the device, read after the graph was replayed.

No code of the host runs while a CUDA graph is replayed. So the operator `reduce` does nothing there
but start kernels: they reduce a tensor and write the result into a row of a buffer that never
moves. At the end of a step, the buffers of all modules are copied to the host together, without
waiting, and become records once they have arrived. The order of all rows is that of a clock on the
device. What the host knows when a graph is recorded is part of its rows, as a number.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from tensortap.frameworks.torch import private, private_compiler
from tensortap.frameworks.torch.cuda import cuda
from tensortap.frameworks.torch.graphs import library
from tensortap.frameworks.torch.hidden import constant_when_compiled
from tensortap.frameworks.torch.origins import on_device
from tensortap.frameworks.torch.summarize import reduce as reduce_tensor
from tensortap.frameworks.torch.tensors import dtype_name
from tensortap.record import Summary
from tensortap.stats import packed

ROWS = 8
"""Largest number of calls of a module that are kept per step."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CLOCK, _KIND, _VECTOR = 0, 1, 2  # the words of a row: when, of which kind, and the statistics
_WORDS = _VECTOR + packed.layout("float32").words


class RowKind(NamedTuple):
    """Metadata of a row on the host, the same in every replay of a recorded graph."""

    dtype: str
    shape: tuple[int, ...]
    again: bool  # computed in a backward pass, by a checkpoint


class Row(NamedTuple):
    """The statistics of one tensor, and the index of its buffer."""

    buffer: int
    kind: RowKind
    stats: Summary


_kinds: list[RowKind] = []

library.define("reduce(Tensor value, Tensor buffer, Tensor clock) -> ()")


def _reduce(value: torch.Tensor, buffer: torch.Tensor, clock: torch.Tensor) -> None:
    kind = RowKind(dtype_name(value.dtype), tuple(value.shape), private.backward_pass() != -1)
    if kind not in _kinds:
        _kinds.append(kind)
    with torch.no_grad():
        # as `data`: a backward pass that saves the buffer must not see that it changes
        rows, now = buffer.data, clock.data
        vector = reduce_tensor(value.detach())
        number = torch.full_like(now, _kinds.index(kind))
        row = torch.cat([now, number, vector])
        index = (rows[0, :1].clamp(max=ROWS) + 1).long()  # the last takes all that are too many
        rows[:, : row.numel()].index_copy_(0, index, row[None])
        rows[0, :1] += 1
        now += 1


def _reduce_nothing(*args: Any) -> None:
    """Stand in for the operator while it is compiled, when tensors have no values."""


library.impl("reduce", _reduce, "CompositeExplicitAutograd")
torch.library.register_fake("tensortap::reduce", _reduce_nothing, lib=library)
_kept = private_compiler.keep_in_graphs(library, "tensortap::reduce")


_in_use = False


def _captured() -> bool:
    """Return whether a CUDA graph is being compiled; torch calls this while it compiles."""
    global _in_use
    captured = _kept and private_compiler.captures_cuda_graphs()
    _in_use = _in_use or captured
    return captured


constant_when_compiled(_captured)


def is_captured(tensor: torch.Tensor) -> bool:
    """Return whether the graph that is being compiled becomes a CUDA graph with this tensor."""
    return on_device(tensor) and tensor.dtype in _DTYPES and _captured()


def reduce(value: torch.Tensor, buffer: torch.Tensor, clock: torch.Tensor) -> None:
    """Make the graph write the statistics of a tensor into a buffer."""
    torch.ops.tensortap.reduce(value, buffer, clock)


def reduce_gradient(tensor: torch.Tensor, buffer: torch.Tensor, clock: torch.Tensor) -> None:
    """Make the graph of the backward pass write the statistics of a gradient into a buffer."""

    def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
        torch.ops.tensortap.reduce(gradient, buffer, clock)
        return gradient

    tensor.register_hook(on_gradient)


class ReplayedBuffers:
    """The buffers of a model on one device, and what was read from them."""

    def __init__(self, device: torch.device, count: int) -> None:
        with torch.inference_mode(False):
            self._memory = torch.zeros(
                count, ROWS + 2, _WORDS, dtype=torch.int32, device=device
            )  # the first row of each counts the others, the last one is not read
            self.clock = torch.zeros(1, dtype=torch.int32, device=device)
        self._buffers = list(self._memory)
        for tensor in (self.clock, *self._buffers):
            private_compiler.keep_address(tensor)
        self._copies: collections.deque[tuple[int, Any, torch.Tensor]] = collections.deque()

    @classmethod
    def of(cls, model: torch.nn.Module, count: int) -> ReplayedBuffers | None:
        """Return buffers on the device of a model; None if it is not on a CUDA device."""
        device = next((p.device for p in model.parameters() if on_device(p)), None)
        return None if device is None else cls(device, count)

    @property
    def in_use(self) -> bool:
        """Whether a graph with buffers was compiled."""
        return _in_use

    def rows(self, number: int, gradient: bool) -> tuple[torch.Tensor | None, ...]:
        """Return the buffers of the outputs and the gradients of a module, and the clock."""
        output, of_gradient = self._buffers[2 * number : 2 * number + 2]
        return output, of_gradient if gradient else None, self.clock

    def end_step(self, step: int | None) -> None:
        """Start to copy the rows of a step to the host, unless it is None, and begin another."""
        with torch.no_grad():
            if step is not None:
                port = cuda().port
                rows = port.clone(self._memory)
                host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
                self._copies.append((step, port.copy(rows, host), host))
            self._memory[:, 0].zero_()
            self.clock.zero_()

    def steps(self, wait: bool) -> Iterator[tuple[int, list[Row], list[int]]]:
        """Yield each step that has arrived: its rows in order, and which buffers had too many.

        With `wait`, wait for those that have not.
        """
        while self._copies and (wait or self._copies[0][1].query()):
            step, event, host = self._copies.popleft()
            event.synchronize()
            memory = host.numpy()
            counts = memory[:, 0, 0]
            full = [int(i) for i in np.flatnonzero(counts > ROWS)]
            found = [
                (memory[i, row, _CLOCK], i, memory[i, row])
                for i, count in enumerate(counts.tolist())
                for row in range(1, min(count, ROWS) + 1)
            ]
            found.sort(key=lambda one: one[:2])
            yield step, [_row(i, words) for _, i, words in found], full


def _row(buffer: int, words: np.ndarray[Any, Any]) -> Row:
    kind = _kinds[words[_KIND]]
    end = _VECTOR + packed.layout(kind.dtype).words
    stats = packed.unpack(words[_VECTOR:end], kind.dtype, kind.shape)
    assert stats is not None  # a row that is counted was written
    return Row(buffer, kind, stats)
