"""Sources notice values: `catch` the ones that the user names."""
