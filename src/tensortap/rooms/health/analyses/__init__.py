"""Families of analyses of training steps: ``tap.track(model, opt, analyses=["norms"])``."""
