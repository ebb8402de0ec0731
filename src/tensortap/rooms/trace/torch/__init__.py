"""What `trace` needs to know about torch models."""
