"""Eight CPU devices for every test, whatever the machine has; float32 unless a test asks for `x64`.

XLA reads its flags once, when the first backend starts, so they are set here, before anything imports jax.
(JAX's own persistent compilation cache is not used: its files are not written atomically, and the workers of
`pytest -n 2` would share them.)
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

DEVICES = 8

# Of a flag given twice XLA takes the last, so the user's other flags live on and the count is ours.
COUNT = f"--xla_force_host_platform_device_count={DEVICES}"
# Compiling is most of what tests take, and none asks how fast code for CPUs is: LLVM need not make it so.
# That saves a third of the CPU seconds of a train step's test. Flags that the user gives come later, and win.
# Where XLA's compiler for GPUs is installed, tests look at what it makes, so that it is left as it is.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
GPU_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None
GIVEN = f"{'' if GPU_COMPILER else QUICK} {os.environ.get('XLA_FLAGS', '')}"
os.environ["XLA_FLAGS"] = f"{GIVEN} {COUNT}"
os.environ["JAX_ENABLE_X64"] = "0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Below tests/: pure Python, or so long that CI runs it on one Python only.
ONCE = (
    "docs",
    "models",
    "passes/physical",
    "passes/plan",
    "passes/schedule",
    "runtime/checkpoint",
    "runtime/processes",
    "conformance/test_random_programs.py",
    "test_wire_bytes.py",
    "benchmarks",
)

import jax  # noqa: E402  (after the flags, on purpose)

# No deadline: the first example of a test pays for the compilation. Derandomized: a failure repeats.
settings.register_profile("sbp", deadline=None, derandomize=True)
settings.load_profile("sbp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what CI runs once."""
    here = Path(__file__).parent
    once = tuple(here / part for part in ONCE)

    @functools.cache  # thousands of tests, hundreds of files
    def is_once(path: Path) -> bool:
        return any(path == part or part in path.parents for part in once)

    for item in items:
        if is_once(item.path):
            item.add_marker(pytest.mark.once)


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Fail early and plainly where something started a backend before the flags were set."""
    found = jax.device_count("cpu")
    if found != DEVICES:
        pytest.exit(f"{DEVICES} CPU devices wanted, {found} found: jax started before tests/conftest.py", 1)


@pytest.fixture(scope="session", autouse=True)
def no_plans_on_disk() -> Iterator[None]:
    """Tests plan anew, and write nothing into the user's home; those of the cache name a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbp.runtime.cache_folder.user_folder", lambda: None)
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types while the test runs: `@pytest.mark.usefixtures("x64")`, or as an argument."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test registers as a rule is gone after it."""
    from sbp.rules import REGISTRY

    known = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(known)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of that name in tests/golden; `--update-golden` writes the file."""
    from tests.golden.texts import FOLDER, difference

    def compare(name: str, text: str) -> None:
        path = FOLDER / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        want = path.read_text(encoding="utf-8") if path.is_file() else ""
        changed = difference(name, want, text)
        where = request.node.path.relative_to(request.config.rootpath).as_posix()
        if changed:
            pytest.fail(
                f"{changed}\n\nif that is meant: python -m pytest {where} --update-golden", pytrace=False
            )

    return compare
