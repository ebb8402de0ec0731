"""Explain in words why values are not finite."""
