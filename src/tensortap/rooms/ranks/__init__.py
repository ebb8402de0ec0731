"""Ranks: where replicas differ, and which rank is unlike the others."""
