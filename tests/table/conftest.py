"""The small training run of the figures' tests."""

from tests.figures.conftest import run_path, table, writer

__all__ = ["run_path", "table", "writer"]
