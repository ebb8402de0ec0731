"""Sinks take records, each on a background thread of its own with a budget of its own."""
