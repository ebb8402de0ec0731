"""Report: a run as one HTML file."""
