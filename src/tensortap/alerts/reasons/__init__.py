"""Why values are not finite, in words."""
