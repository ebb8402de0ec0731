"""A live session for the tests of this folder, as in tests/live."""

from tests.live.conftest import server  # noqa: F401 - a fixture
