"""Inputs of a model that are compared across ranks.

Ranks of a tensor-parallel model should get the same batch, and data-parallel ranks different ones.
A pipeline stage should get what the stage before it has returned. The digests are computed at the
first call of a step: the program may reuse its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensortap.frameworks.observing import (
    STAGE,
    ReplicatedTensor,
    TrackObserver,
    inputs_of,
    tensors_in,
)
from tensortap.frameworks.snapshot import shard_digest_of
from tensortap.frameworks.torch import private_compiler
from tensortap.frameworks.torch.hooks import ModuleHook, hook_module
from tensortap.frameworks.torch.meshes import data_ranks, tensor_mesh
from tensortap.frameworks.torch.shards import observed
from tensortap.frameworks.torch.stages import current_stage, has_pipelines, ranks_of_stages
from tensortap.record import Kind


class RankInputs:
    """Digests of the inputs of one model, in the steps in which replicas are compared."""

    def __init__(self, root: torch.nn.Module, observer: TrackObserver) -> None:
        self._root = root
        self._observer = observer
        self._mesh = tensor_mesh(root)
        self._data_ranks = data_ranks(root)
        self._found: dict[str, list[ReplicatedTensor]] = {}  # by what they are compared with
        self._undo: list[Callable[[], object]] = []

    def attach(self) -> None:
        """Look at the inputs from now on."""
        in_pipeline = has_pipelines()
        if len(self._mesh.ranks) > 1 or len(self._data_ranks) > 1 or in_pipeline:
            hook = ModuleHook(self._enter)
            self._undo.append(hook_module(self._root, hook, before=True, with_kwargs=True))
            self._undo.append(private_compiler.before_compiled_call(self._root, self._enter))
        if in_pipeline:
            self._undo.append(hook_module(self._root, ModuleHook(self._leave)))

    def detach(self) -> None:
        """Look no longer."""
        while self._undo:
            self._undo.pop()()

    def take(self) -> list[ReplicatedTensor]:
        """Return the digests of this step."""
        found, self._found = self._found, {}
        return [tensor for each in found.values() for tensor in each]

    def _enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._observer.replicas_due():
            return
        try:
            inputs = [(path[1:], tensor) for path, tensor in inputs_of(args, kwargs, torch.Tensor)]
            self._add("same", inputs, self._mesh.ranks, self._mesh.is_named)
            if module.training and torch.is_grad_enabled():
                self._add("distinct", inputs, self._data_ranks, True)
            self._add_stage(args, 0)
        except Exception as error:
            self._observer.fault("replicas", error)

    def _leave(self, _: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._observer.replicas_due():
            return
        try:
            self._add_stage(output if isinstance(output, (tuple, list)) else (output,), 1)
        except Exception as error:
            self._observer.fault("replicas", error)

    def _add_stage(self, values: Any, later: int) -> None:
        """Add what this stage of a pipeline gets, or what it gives to the next one."""
        stage = current_stage()
        if stage is None:
            return
        index = stage.stage_index + later
        ranks = ranks_of_stages(stage, index - 1, index)
        name = f"{STAGE}{index}"
        tensors = list(tensors_in(dict(enumerate(values)), torch.Tensor, f"{name} input"))
        # a stage of a traced model may also get what earlier stages have returned
        is_chain = type(stage).__name__ == "PipelineStage"
        self._add(name, tensors, ranks, is_chain)

    def _add(
        self, key: str, tensors: list[tuple[str, Any]], ranks: tuple[int, ...], certain: bool
    ) -> None:
        if len(ranks) < 2 or key in self._found:
            return
        found = self._found[key] = []
        for name, tensor in tensors:
            if not hasattr(tensor, "device_mesh") and tensor.numel():
                seen, local = observed(name, Kind.VALUE, tensor)
                digest = shard_digest_of(local, None)
                distinct = key == "distinct"
                found.append(ReplicatedTensor(seen, digest, ranks, certain, distinct))
