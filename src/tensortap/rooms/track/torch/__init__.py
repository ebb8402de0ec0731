"""Tracking of torch models."""
