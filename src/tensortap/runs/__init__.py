"""The run format: the sink that writes it, its reader, dumped files."""
