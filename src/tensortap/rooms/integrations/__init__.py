"""Callbacks for trainers, and exports of statistics for dashboards.

Each module is imported at first use: `keras`, `lightning`, `tensorboard`, `transformers`, `wandb`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensortap.rooms.integrations import keras, lightning, tensorboard, transformers, wandb

__all__ = ["keras", "lightning", "tensorboard", "transformers", "wandb"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return __all__
