"""Nothing is imported before it is used, and what is missing is said."""

from __future__ import annotations

import pytest

import tensortap as tap
from tests.test_package import python


def test_looking_at_them_imports_none():
    code = """
import tensortap as tap
print(dir(tap.integrations)[-4:])
libraries = "lightning pytorch_lightning transformers tensorboard wandb torch".split()
print([name for name in libraries if name in sys.modules])
import tensortap.integrations.tensorboard, tensortap.integrations.wandb
print([name for name in libraries if name in sys.modules])
"""
    names = "['lightning', 'tensorboard', 'transformers', 'wandb']"
    assert python(code).splitlines() == [names, "[]", "[]"]


def test_one_that_there_is_not():
    with pytest.raises(AttributeError, match=r"'tensortap.integrations' has no attribute 'mlflow'"):
        tap.integrations.mlflow


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("lightning", "needs Lightning: pip install lightning"),
        ("transformers", "needs transformers: pip install transformers"),
    ],
)
def test_without_the_library(module, said):
    code = f"""
for name in ("lightning", "pytorch_lightning", "transformers"):
    sys.modules[name] = None
import tensortap as tap
try:
    tap.integrations.{module}
except tap.errors.MissingExtra as error:
    print(error)
"""
    assert said in python(code)
