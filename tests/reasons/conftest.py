"""No live session takes part, as in tests/compare."""

from tests.compare.conftest import no_live_session

__all__ = ["no_live_session"]
