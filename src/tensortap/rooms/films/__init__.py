"""Tensors drawn as frames, and frames written as films."""
