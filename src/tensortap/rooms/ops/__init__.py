"""Operations: every operation of a step, and why one made a NaN."""
