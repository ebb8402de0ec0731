"""Weights, inputs and rows of torch models."""

from tensortap.rooms.align.torch.inputs import perturb_inputs
from tensortap.rooms.align.torch.weights import named_tensors, pieces, sum_over_ranks

__all__ = ["named_tensors", "perturb_inputs", "pieces", "sum_over_ranks"]
