"""NumPy arrays and scalars."""
