"""One columnar table of records and their statistics."""
