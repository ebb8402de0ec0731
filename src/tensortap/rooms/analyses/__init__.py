"""Analyses: families of numbers about training steps."""
