"""What the room shows."""

import tensortap.provenance


def test_what_the_room_shows():
    assert tensortap.provenance.__all__ == [
        "Keeper", "Redactor", "Reproduced", "collect", "reproduce",
    ]  # fmt: skip
    assert sorted(tensortap.provenance.__all__) == tensortap.provenance.__all__
    assert all(hasattr(tensortap.provenance, name) for name in tensortap.provenance.__all__)
