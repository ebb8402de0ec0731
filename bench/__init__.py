"""Measure what tensortap costs, as ratios within one run: `make bench`."""
