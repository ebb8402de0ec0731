"""Bisect: the module whose fault a difference is."""
