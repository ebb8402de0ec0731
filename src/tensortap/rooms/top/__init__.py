"""Top: a live session in the terminal."""
