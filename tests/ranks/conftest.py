"""A live session, and programs that send to it, as in tests/live."""

from tests.live.conftest import (
    programs,  # noqa: F401 - a fixture
    run,  # noqa: F401 - a fixture
    server,  # noqa: F401 - a fixture
    starters,  # noqa: F401 - a fixture
)
