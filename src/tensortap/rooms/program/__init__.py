"""Program: `tensortap run`, which tracks a training program without a change to it."""
