"""Trace: local variables of functions, also as HDF5."""
