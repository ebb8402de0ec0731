"""A live session, and programs that send to it, as in tests/live."""

from tests.live.conftest import programs  # noqa: F401 - a fixture
from tests.live.conftest import run  # noqa: F401 - a fixture
from tests.live.conftest import server  # noqa: F401 - a fixture
from tests.live.conftest import starters  # noqa: F401 - a fixture
