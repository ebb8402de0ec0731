"""Black box: keep a step, run it again, and say what happened in it."""
