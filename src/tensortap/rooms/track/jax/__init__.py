"""Tracking of JAX functions."""
