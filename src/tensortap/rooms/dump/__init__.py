"""Dump: one plain file per object."""
