"""Suppresses messages of a CUDA plugin that is installed only to compile."""

import importlib.util
import os
from pathlib import Path

PLUGIN = "jax_cuda13_plugin"
# Without it the plugin looks for the CUDA libraries, and JAX prints a traceback for want of them.
SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
DRIVER = Path("/dev/nvidiactl")


def expect_no_driver() -> None:
    """Tells the CUDA plugin not to look for a driver and libraries, if it is installed without a GPU.

    It must be told before JAX counts its devices, so `import sbp` does it.
    """
    if not DRIVER.exists() and importlib.util.find_spec(PLUGIN) is not None:
        os.environ.setdefault(SKIP_CHECK, "1")
