"""Compact: rewrite the sealed parts of a run as sorted windows with a roll-up."""
