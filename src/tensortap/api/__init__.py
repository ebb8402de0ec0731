"""What people type in a REPL or a notebook to look at a live session."""
