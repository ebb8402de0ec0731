"""The verbs that people type in a REPL or a notebook: serve, get, open, and what they return."""
