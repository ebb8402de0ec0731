"""Tensors drawn as frames, and frames made into films."""
