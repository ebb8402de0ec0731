"""Losses of tensors in other number formats."""
