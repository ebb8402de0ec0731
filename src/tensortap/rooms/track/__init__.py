"""Track: the numerics of a whole model."""
