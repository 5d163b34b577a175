"""What the tests of reports share: one planned train step."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import sbp
from sbp.passes.face import Plan
from tests.golden.hardware import HARDWARE

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture(scope="session")
def two_layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_two_layers", GOLDEN / "two_layers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def plan(two_layers: ModuleType) -> Plan:
    """The plan of the two-layer step, data parallel between 2 groups, tensor parallel within 4."""
    devices = sbp.placement("gpu", shape=(2, 4))
    program = sbp.compile(
        two_layers.step, devices, in_sbp=two_layers.step_sbp(devices), options=sbp.Options(hardware=HARDWARE)
    )
    return program.plan(*two_layers.step_args())
