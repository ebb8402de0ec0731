"""A live session, as in tests/live."""

from tests.live.conftest import server  # noqa: F401 - a fixture
