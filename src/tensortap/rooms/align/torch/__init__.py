"""Weights and rows of torch models."""

from tensortap.rooms.align.torch.weights import named_tensors, pieces, sum_over_ranks

__all__ = ["named_tensors", "pieces", "sum_over_ranks"]
