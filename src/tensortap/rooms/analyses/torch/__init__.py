"""Hooks that tell the analyses what happens in a torch model."""
