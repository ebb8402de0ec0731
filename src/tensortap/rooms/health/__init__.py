"""Health: rules over training steps."""
