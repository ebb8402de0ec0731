"""The demo: a first look at tensortap."""
