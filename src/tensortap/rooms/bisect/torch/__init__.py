"""Grafts in torch models."""
