"""Readers give records back, wherever they lie, through one protocol."""
