"""The run format: the sink that writes it, and its reader."""
