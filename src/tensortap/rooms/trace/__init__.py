"""Trace: local variables of chosen functions, found by path, seen where they are bound."""
