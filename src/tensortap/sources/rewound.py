"""A context in which a program may run any steps, and after which nothing has happened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensortap.frameworks.replaying import Training
from tensortap.pipeline.pipeline import pipeline


@contextlib.contextmanager
def rewound(training: Training) -> Iterator[None]:
    """Run steps inside; afterwards everything is as it was, bit by bit."""
    present, clock = training.keep_present(), pipeline.clock
    enabled, step, steps = pipeline.enabled, clock.step, clock.steps
    pipeline.switch(False)  # nobody tracks or catches what is run
    try:
        yield
    finally:
        training.restore(present)
        clock.step, clock.steps = step, steps
        pipeline.switch(enabled)
