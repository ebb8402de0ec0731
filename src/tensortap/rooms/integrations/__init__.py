"""Callbacks for trainers, and exports of statistics for dashboards.

Each module is imported at first use: `keras`, `lightning`, `tensorboard`, `transformers`, `wandb`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.rooms.integrations import keras, lightning, tensorboard, transformers, wandb

__all__ = ["keras", "lightning", "tensorboard", "transformers", "wandb"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tensortap.rooms.integrations' has no attribute {name!r}")
    import importlib

    return importlib.import_module(f"tensortap.rooms.integrations.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
