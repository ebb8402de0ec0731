"""The run format on disk."""
