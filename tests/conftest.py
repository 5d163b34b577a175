"""Eight CPU devices for every test, whatever the machine has; float32 unless a test asks for `x64`.

XLA reads its flags once, when the first backend starts, so they are set here, before anything imports jax.
(JAX's own persistent compilation cache is not used: its files are not written atomically, and the workers of
`pytest -n 2` would share them.)
"""

import functools
import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings

from tests.cpu_seconds import CpuSeconds

DEVICES = 8
# What addopts in pyproject.toml leave out.
DEFAULT = "not full and not slow"

# Of a flag given twice XLA takes the last, so the user's other flags live on and the count is ours.
COUNT = f"--xla_force_host_platform_device_count={DEVICES}"
# Compiling is most of what tests take, and none asks how fast code for CPUs is: LLVM need not make it so.
# That saves a third of the CPU seconds of a train step's test. Flags that the user gives come later, and win.
# Where XLA's compiler for GPUs is installed, tests look at what it makes, so that it is left as it is.
HASTY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
GPU_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None
# XLA ends the process when a device has waited 40 s for others, which a busy machine can take.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=900 --xla_cpu_collective_timeout_seconds=900"
GIVEN = f"{PATIENT} {'' if GPU_COMPILER else HASTY} {os.environ.get('XLA_FLAGS', '')}"
os.environ["XLA_FLAGS"] = f"{GIVEN} {COUNT}"
os.environ["JAX_ENABLE_X64"] = "0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Below tests/. One file a package, the first that anybody runs: `pytest -m quick` opens no other.
QUICK = (
    "benchmarks/test_pipelined.py",
    "conformance/test_gradients.py",
    "ecosystem/test_modules.py",
    "errors/test_call_messages.py",
    "errors/test_rows_messages.py",
    "golden/test_algebra.py",
    "models/recommender/test_batch.py",
    "models/test_mlp.py",
    "passes/boxing/test_table.py",
    "passes/explain/test_notes.py",
    "passes/render/test_text.py",
    "passes/physical/test_evaluate.py",
    "passes/pipeline/test_parts.py",
    "passes/plan/test_pins.py",
    "passes/program/test_hoist.py",
    "passes/schedule/test_simulate.py",
    "passes/test_chain.py",
    "rules/test_structure.py",
    "runtime/checkpoint/test_elsewhere.py",
    "runtime/embedding/test_inputs.py",
    "runtime/hlo/test_parser.py",
    "runtime/profile/test_trace_attribution.py",
    "runtime/pipeline/test_shared_executables.py",
    "runtime/processes/test_call_order.py",
    "runtime/search/test_scanned.py",
    "runtime/source/test_fold.py",
    "runtime/target/test_trace.py",
    "runtime/call/test_calls.py",
    "sbp/rates/test_tables.py",
    "sbp/test_meshes.py",
    "communication/test_halo.py",
    "test_house.py",
)
# What another line of JAX can change: what is traced, what primitives are called, what XLA makes. CI runs
# these on the oldest Python too.
LINES = (
    *("conformance", "ecosystem", "errors", "golden", "passes/program", "rules", "communication"),
    *("runtime/call/test_calls.py", "runtime/call/test_donation.py", "runtime/lower/test_control_flow.py"),
    *("runtime/lower/test_conversions.py", "runtime/nan_checks/test_findings.py"),
    *("runtime/program/test_names.py", "runtime/program/test_program.py", "runtime/program/test_start.py"),
    *("runtime/source", "sbp/test_checker.py", "sbp/test_batching.py"),
)

import jax  # noqa: E402  (after the flags, on purpose)

# No deadline: the first example of a test pays for the compilation. Derandomized: a failure repeats.
settings.register_profile("sbp", deadline=None, derandomize=True)
settings.load_profile("sbp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the full suite, not one of ten CPU minutes")
    parser.addoption("--turn", metavar="K/N", help="of the full tests the Kth of N parts, of 0 to N - 1")
    parser.addoption("--cpu-seconds", action="store_true", help="print what folders and tests took")
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")


def pytest_configure(config: pytest.Config) -> None:
    named = any("::" in argument for argument in config.args)
    if config.getoption("--full"):
        config.option.markexpr = "not slow"
    elif named and config.option.markexpr == DEFAULT:
        config.option.markexpr = ""  # who names a test means it
    config.pluginmanager.register(CpuSeconds(config.getoption("--cpu-seconds")))


def is_of(files: tuple[str, ...], path: Path) -> bool:
    here = Path(__file__).parent
    return any(path == here / file or here / file in path.parents for file in files)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Opening a thousand files takes as long as the quick tests."""
    quick = config.option.markexpr == "quick" and collection_path.is_file()
    return True if quick and not is_of(QUICK, collection_path) else None


def leave_out(items: list[pytest.Item]) -> None:
    """Of a test with `some(3, "name")`, three cases stay, spread evenly, and the one of that name."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("some"):
            cases[item.path, item.originalname].append(item)
    for of_test in cases.values():
        given = of_test[0].get_closest_marker("some").args
        most = given[0] if isinstance(given[0], int) else 0
        kept = {round(i * (len(of_test) - 1) / max(most - 1, 1)) for i in range(min(most, len(of_test)))}
        kept |= {i for i, item in enumerate(of_test) if item.callspec.id in given}
        for i, item in enumerate(of_test):
            if i not in kept:
                item.add_marker(pytest.mark.full)


def keep_turn(items: list[pytest.Item], turn: str) -> None:
    """Of the full tests those that have their turn stay."""
    part, parts = map(int, turn.split("/"))
    items[:] = [x for x in items if "full" not in x.keywords or crc32(x.nodeid.encode()) % parts == part]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(items)
    if config.option.turn:
        keep_turn(items, config.option.turn)
    of_file = functools.cache(lambda path: (is_of(QUICK, path), is_of(LINES, path)))
    for item in items:
        quick, lines = of_file(item.path)
        if "slow" not in item.keywords and "full" not in item.keywords:
            if quick:
                item.add_marker(pytest.mark.quick)
            if lines:
                item.add_marker(pytest.mark.lines)


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
        patch.setattr("sbp.runtime.cache.cache_folder.user_folder", lambda: None)
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
