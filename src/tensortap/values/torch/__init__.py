"""Everything that knows PyTorch."""
