"""Models of torch, as `trace` sees them."""
