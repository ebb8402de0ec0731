"""Export: a run in another format."""
