"""JAX's primitives: each has a rule, is seen through, is a loop, or has its reason in the table."""

import importlib
import inspect
import pkgutil
from collections import Counter
from functools import cache
from typing import Any

import jax
from jax._src.interpreters import mlir

from sbp.compat import core, ops
from sbp.passes.program.control import CONTROL
from sbp.passes.program.expand import EXPANDED, PASSED
from sbp.rules import REGISTRY
from sbp.rules.without import WITHOUT

# Where JAX defines primitives that are not there after `import jax`.
PARTS = (
    "jax.experimental.sparse",
    "jax.experimental.buffer_callback",
    "jax.experimental.checkify",
    "jax.experimental.custom_partitioning",
    "jax.experimental.multihost_utils",
    "jax.experimental.pallas",
    "jax.experimental.pallas.tpu",
    "jax.export",
)
SKIPPED = ("test", "mosaic", "triton", "tpu", "gpu", "jax2tf", "cloud", "colab", "serialization")
# What only one line of JAX has; a name here that both have, or none, fails.
ONLY_NEW = set(
    "program_order reduced_vary_cast vary_unreduced_cast thunky.inline_constant unreduced_pmax "
    "unreduced_pmin".split()
)
ONLY_OLD = set(
    "core_map pbroadcast_done psum_start reduced_vary_cast_p unreduced_psum_start "
    "unreduced_reduce_scatter_start vary_unreduced_cast_p".split()
)
NEW = jax.__version_info__ >= (0, 12)


@cache
def primitives() -> dict[str, list[object]]:
    """What JAX can lower on CPU, by name."""
    for part in PARTS:
        importlib.import_module(part)
    for found in pkgutil.walk_packages(importlib.import_module("jax._src").__path__, "jax._src."):
        if not any(word in found.name for word in SKIPPED) and "pallas" not in found.name:
            importlib.import_module(found.name)
    out: dict[str, list[object]] = {}
    for p, entry in {**mlir._lowerings, **mlir._platform_specific_lowerings["cpu"]}.items():
        if home(entry.rule).startswith("jax."):
            out.setdefault(p.name, []).append(p)
    return out


def home(rule: Any) -> str:
    """The module that lowers a primitive: ours and those of tests are not JAX's."""
    if rule.__class__.__name__ == "function" and rule.__qualname__ == "lower_fun.<locals>.f_lowered":
        rule = inspect.getclosurevars(rule).nonlocals["fun"]
    return str(getattr(rule, "func", rule).__module__)


def uncovered() -> set[str]:
    """The names that nothing but the table can account for."""
    known = {*REGISTRY, *core.CALLS, *CONTROL, *EXPANDED, *PASSED}
    rest = {name: found for name, found in primitives().items() if name not in known}
    return {name for name, found in rest.items() if not all(map(ops.lowered_function, found))}


def test_every_primitive_without_a_rule_has_its_reason() -> None:
    assert uncovered() - {op for group in WITHOUT for op in group.ops} == set()


def test_no_reason_is_stale() -> None:
    """Each name is a primitive of this line of JAX that has nothing else, and stands in the table once."""
    counts = Counter(op for group in WITHOUT for op in group.ops)
    assert set(counts.values()) == {1}
    of_the_other_line = ONLY_OLD if NEW else ONLY_NEW
    assert set(counts) - uncovered() == of_the_other_line & set(counts)
    assert (ONLY_NEW if NEW else ONLY_OLD) - uncovered() == set()


def test_no_name_that_is_passed_or_expanded_is_unknown() -> None:
    """They are JAX's names, of one line at least."""
    assert {*EXPANDED, *PASSED} - set(primitives()) <= {"shard_alike", "relayout"}
