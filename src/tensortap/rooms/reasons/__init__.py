"""Reasons: simple explanations why two tensors differ."""
