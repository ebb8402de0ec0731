"""Everything that knows MLX."""
