"""What the tests of reports share: one planned train step, and texts to compare with."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import sbp
from sbp.passes.face import Plan

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
# Round figures of no real chip: the golden texts must not change with the catalogue.
HARDWARE = sbp.Hardware(
    name="golden",
    flops_per_second=((4, 100e12),),
    vector_flops_per_second=20e12,
    memory_bytes_per_second=2e12,
    memory_bytes=64e9,
    links=(sbp.Link(8, 200e9, 5e-6), sbp.Link(1 << 62, 50e9, 10e-6)),
    efficiency=1.0,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")


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


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of that name; `pytest tests/passes --update-golden` writes the files."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden", default=False):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no {path.name}: run pytest tests/passes --update-golden"
        assert text == path.read_text(encoding="utf-8"), "if the change is meant: --update-golden"

    return compare
