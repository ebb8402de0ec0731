"""Check all models that can be built: ``python -m tests.sweep [pattern]``."""

from __future__ import annotations

import collections
import gc
import logging
import re
import signal
import sys
import time
import warnings
from typing import Any

import torch

from tests.sweep.checks import problems
from tests.sweep.models import NotBuilt, diffusers_models, transformers_models

SECONDS = 60  # of the processor, for one model


class TooLong(BaseException):
    """A model takes too long; no hook may take it for an error of its own."""


def main() -> int:
    """Check every model; print what is wrong, and how many are right."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    pattern = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    signal.signal(signal.SIGPROF, _too_long)
    counts: dict[str, collections.Counter[str]] = {}
    for find in (transformers_models, diffusers_models):
        for name, make in find():
            if not pattern.search(name):
                continue
            start = time.perf_counter()
            verdict, details = check(make)
            counts.setdefault(name.split()[0], collections.Counter())[verdict] += 1
            took = time.perf_counter() - start
            print(f"{verdict:10} {took:5.1f} s  {name}  {details}"[:400], flush=True)
            gc.collect()
    for library, found in counts.items():
        checked = found["right"] + found["wrong"]
        print(f"{library}: {found['right']} of {checked} right; {found['not built']} not built")
    return int(any(found["wrong"] for found in counts.values()))


def check(make: Any) -> tuple[str, str]:
    """Return the verdict about one model, and details."""
    torch.set_grad_enabled(True)  # whatever the model before was interrupted in
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        found = problems(make)
    except (NotBuilt, TooLong) as error:
        return "not built", str(error).replace("\n", " ")
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}".replace("\n", " ")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if found and "not reproducible" in found[0]:
        return "not built", found[0]
    return ("wrong", "; ".join(found)) if found else ("right", "")


def _too_long(*_: Any) -> None:
    raise TooLong(f"longer than {SECONDS} s")


if __name__ == "__main__":
    sys.exit(main())
