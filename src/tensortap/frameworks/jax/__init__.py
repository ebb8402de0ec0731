"""Everything that knows JAX."""
