"""Doctor: what is installed, whether a session answers, and whether a device does its part."""
