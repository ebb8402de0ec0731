"""The receiving end of the live path."""
