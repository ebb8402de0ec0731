"""Analyses of training steps, by family: ``tap.track(model, opt, analyses=["norms"])``."""

from tensortap.rooms.health.analyses.families import FAMILIES, Chosen, chosen_families

__all__ = ["FAMILIES", "Chosen", "chosen_families"]
