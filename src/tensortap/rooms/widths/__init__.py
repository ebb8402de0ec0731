"""Widths: coordinate checks of models of several widths."""
