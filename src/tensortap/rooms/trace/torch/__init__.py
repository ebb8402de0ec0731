"""Torch models and tensors as `trace` needs them."""
