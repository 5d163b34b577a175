"""XLA's compiler for GPUs that are not here, which some tests need."""

import pytest

import sbp
from sbp.runtime.target.devices import missing_devices

LACKING = missing_devices(sbp.placement("h100", shape=(8,)))
needs_plugin = pytest.mark.skipif(
    LACKING is not None, reason=f"{LACKING.got}: {LACKING.fix}" if LACKING is not None else ""
)
