"""Health: rules over training steps, analyses, and `tensortap run`."""
