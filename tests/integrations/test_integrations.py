"""Lazy imports, and messages about missing libraries."""

from __future__ import annotations

import pytest

import tensortap as tap
from tests.test_package import python


def test_libraries_are_imported_at_first_use():
    code = """
import tensortap as tap
print(dir(tap.integrations)[-5:])
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
        tap.integrations.mlflow


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("keras", "needs Keras 3: pip install keras"),
        ("lightning", "needs Lightning: pip install lightning"),
        ("transformers", "needs transformers: pip install transformers"),
    ],
)
def test_reports_a_missing_library(module, message):
    code = f"""
for name in ("keras", "lightning", "pytorch_lightning", "transformers"):
    sys.modules[name] = None
import tensortap as tap
try:
    tap.integrations.{module}
except tap.errors.MissingExtra as error:
    print(error)
"""
    assert message in python(code)
