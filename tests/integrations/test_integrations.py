"""Lazy imports, and messages about missing libraries."""

from __future__ import annotations

import re

import pytest

import tensortap as tap
from tests.test_package import python


def test_libraries_are_imported_at_first_use():
    code = """
import tensortap as tap
print(dir(tap.rooms.integrations)[-5:])
libraries = "keras lightning pytorch_lightning transformers tensorboard wandb torch".split()
print([name for name in libraries if name in sys.modules])
import tensortap.rooms.integrations.tensorboard, tensortap.rooms.integrations.wandb
print([name for name in libraries if name in sys.modules])
"""
    names = "['keras', 'lightning', 'tensorboard', 'transformers', 'wandb']"
    assert python(code).splitlines() == [names, "[]", "[]"]


def test_unknown_integration():
    with pytest.raises(
        AttributeError, match=r"'tensortap.rooms.integrations' has no attribute 'mlflow'"
    ):
        tap.rooms.integrations.mlflow


def test_reports_missing_libraries():
    code = """
for name in ("keras", "lightning", "pytorch_lightning", "transformers"):
    sys.modules[name] = None
import tensortap as tap
for name in ("keras", "lightning", "transformers"):
    try:
        getattr(tap.rooms.integrations, name)
    except tap.core.errors.MissingExtra as error:
        print(error)
"""
    assert re.findall("pip install [a-z]+", python(code)) == [
        "pip install keras", "pip install lightning", "pip install transformers",
    ]  # fmt: skip
