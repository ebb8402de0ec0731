"""The C code that XLA calls for statistics."""

from tensortap.rooms.track.jax import device_stats


def test_extension_is_built_and_registered():
    assert device_stats.native()
