"""What the tests of this room share."""

import pytest

from tensortap.buffers import Pool


@pytest.fixture
def pool():
    return Pool()
