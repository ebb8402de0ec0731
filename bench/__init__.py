"""What tensortap costs, as ratios measured in one run: `make bench`."""
