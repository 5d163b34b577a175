"""A few of the random programs, compiled for GPUs that are not here."""

import random

import pytest

from tests.conformance.gpu_programs import outcome
from tests.conformance.random_code import draw_program
from tests.runtime.target.plugin import needs_plugin


@pytest.mark.full
@needs_plugin
@pytest.mark.parametrize("number", ["1.31", "1.34", "2.9", "2.51", "2.54", "3.0", "3.1", "3.72"])
def test_every_collective_is_explained(number: str) -> None:
    """Those that once were not, and some more: XLA narrows types, combines, and shares equal branches."""
    kind, what = outcome(draw_program(random.Random(number).choice), "h100")
    assert kind in ("explained", "refused"), what
