"""Tensors and records as one line of plain text."""
