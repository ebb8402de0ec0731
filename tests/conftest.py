"""Settings that pyproject.toml has no place for."""

from hypothesis import HealthCheck, settings

# No deadlines: two workers share two cores with the processes that the tests start, and a first
# call into torch or jax takes as long as it takes.
settings.register_profile("tensortap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tensortap")
