"""Everything that knows JAX."""

import os
import sys

if "jax" not in sys.modules:
    # a viewer that rebuilds an array must not take the accelerator's memory from the training
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
