"""Alignment of torch models."""
