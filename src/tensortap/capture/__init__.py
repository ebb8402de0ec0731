"""Turn values into records and hand them to sinks."""
