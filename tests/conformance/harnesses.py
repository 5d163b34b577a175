"""JAX's own harnesses as cases: each is compiled for eight devices under signatures drawn at random.

JAX keeps one harness per use of a primitive (`jax._src.internal_test_util.test_harnesses`) to test its own
backends with. A case runs one harness twice, plainly and distributed, and compares. What is drawn depends on
the name of the case alone, so a case can be repeated by its name.
"""

from __future__ import annotations

import random
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sbp
from sbp.hardware.catalogue import Hardware, Link
from sbp.passes.face import Plan
from sbp.passes.physical.program import Compute, Physical
from sbp.signature import B, NdSbp, Signature, Split, format_sbp
from tests.annotated import annotated
from tests.conformance.compare import mismatch

HIERARCHIES = ((8,), (2, 4), (2, 2, 2))
ATTEMPTS = 4
_ANY = 1 << 60
# Where arithmetic is slow and the network free, every op is split that can be.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(_ANY, 1e12, 1e-9),), 1.0)
# Where the network is slow, tensors stay as they were drawn, and what can be done on the shards is.
STAYING = Hardware("staying", ((8, 1e9),), 1e9, 1e12, 1e12, (Link(_ANY, 1e3, 1e-3),), 1.0)
# Nearly all the time goes into compiling small programs: the compiler need not try hard.
HASTY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

PASSED, WHOLE, NOTHING = "passed", "whole only", "nothing to split"
UNSUPPORTED, FAILED = "unsupported by JAX", "failed"
STATUSES = (PASSED, WHOLE, NOTHING, UNSUPPORTED, FAILED)


@dataclass(frozen=True, slots=True)
class Case:
    """One harness; `name` is unique."""

    name: str
    group: str
    harness: Any

    def __str__(self) -> str:
        return self.name

    @property
    def supported(self) -> bool:
        """Whether JAX says that it runs the harness on CPUs."""
        return bool(self.harness.filter("cpu"))


@dataclass(frozen=True, slots=True)
class Draw:
    """What a case is compiled for: the devices, what to plan for, and a signature per argument."""

    hierarchy: tuple[int, ...]
    hardware: Hardware
    in_sbp: tuple[NdSbp, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one case.

    Arguments:
      status: one of STATUSES.
      attempt: the number of the draw that ran; with the name it repeats the case.
      hierarchy, hardware, in_sbp: the draw.
      split: ops that ran split.
      whole: ops that ran whole although they have a tensor with a dim longer than 1.
      seconds: of the whole case.
      message: of what is unsupported or failed: the phase, the error, the place.
    """

    name: str
    group: str
    status: str
    attempt: int = 0
    hierarchy: tuple[int, ...] = ()
    hardware: str = ""
    in_sbp: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    seconds: float = 0.0
    message: str = ""


@cache
def all_cases() -> tuple[Case, ...]:
    """Every harness of the installed JAX, by name; 64-bit types included."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002  (a few harnesses draw their operands when they are defined)
    try:
        with jax.enable_x64(True):
            from jax._src.internal_test_util import test_harnesses
    finally:
        np.random.set_state(state)  # noqa: NPY002
    seen: Counter[str] = Counter()
    cases = []
    for harness in test_harnesses.all_harnesses:
        seen[harness.fullname] += 1
        again = f"#{seen[harness.fullname]}" if seen[harness.fullname] > 1 else ""
        cases.append(Case(harness.fullname + again, harness.group_name, harness))
    return tuple(sorted(cases, key=lambda case: case.name))


def spread_cases(count: int, seed: int = 0) -> list[Case]:
    """A fixed sample of what JAX supports: one case of every group in turn, until there are `count`."""
    groups: dict[str, list[Case]] = {}
    for case in filter(lambda case: case.supported, all_cases()):
        groups.setdefault(case.group, []).append(case)
    for group, cases in groups.items():
        random.Random(f"{seed} {group}").shuffle(cases)
    out: list[Case] = []
    for turn in range(max(map(len, groups.values()))):
        out += [cases[turn] for _, cases in sorted(groups.items()) if turn < len(cases)]
        if len(out) >= count:
            break
    return out[:count]


def arguments(case: Case) -> list[Any]:
    """The arguments of a case, always the same."""
    return list(case.harness.dyn_args_maker(np.random.RandomState(zlib.crc32(case.name.encode()))))


def draw(case: Case, args: Sequence[Any], attempt: int) -> Draw:
    """A placement and a signature for every argument, one of them split if one can be."""
    rng = random.Random(f"{case.name} {attempt}")
    hierarchy = rng.choice(HIERARCHIES)
    hardware = rng.choice((SPLITTING, STAYING))
    shapes = [np.shape(x) for x in jax.tree.leaves(args)]
    splittable = any(map(is_long, shapes))
    while True:
        found = tuple(tuple(rng.choice(_one_axis(shape)) for _ in hierarchy) for shape in shapes)
        if not splittable or any(
            is_long(shape) and set(nd) != {B} for shape, nd in zip(shapes, found, strict=True)
        ):
            return Draw(hierarchy, hardware, found)


def _one_axis(shape: Sequence[int]) -> list[Signature]:
    return [B, *map(Split, range(len(shape)))]


def is_long(shape: Sequence[int]) -> bool:
    """Whether there is something to split."""
    return any(n > 1 for n in shape)


def computes(physical: Physical) -> Iterator[Compute]:
    """The ops of a program as they run, annotations aside."""
    for step, _ in physical.walk():
        if isinstance(step, Compute) and step.node.op != "sbp_annotate":
            yield step


def split_and_whole(physical: Physical) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ops that run split, and those that run whole though they have something to split."""
    split, whole = set(), set()
    for step in computes(physical):
        signatures = (*step.strategy.operands, *step.strategy.results)
        if any(s != B for nd in signatures for s in nd):
            split.add(step.node.op)
        elif any(map(is_long, _shapes(physical, step))):
            whole.add(step.node.op)
    return tuple(sorted(split)), tuple(sorted(whole))


def _shapes(physical: Physical, step: Compute) -> list[tuple[int, ...]]:
    return [physical.graph.operand(x).shape for x in (*step.node.inputs, *step.node.outputs)]


def status_of(physical: Physical) -> str:
    """PASSED where an op runs split, else WHOLE; NOTHING where no op has a tensor to split."""
    split, whole = split_and_whole(physical)
    return PASSED if split else WHOLE if whole else NOTHING


@dataclass(frozen=True, slots=True)
class Planned:
    """A program for one draw."""

    attempt: int
    draw: Draw
    program: Any
    plan: Plan


def plan(case: Case, args: Sequence[Any], attempt: int) -> Planned:
    """The program and the plan of one draw."""
    drawn = draw(case, args, attempt)
    leaves, on = [list(nd) for nd in drawn.in_sbp], sbp.placement("cpu", shape=drawn.hierarchy)
    in_sbp = jax.tree.unflatten(jax.tree.structure(tuple(args)), leaves)
    kept = annotated(case.harness.dyn_fun, on, in_sbp)
    options = sbp.Options(hardware=drawn.hardware, check=True)
    program = sbp.compile(kept, on, in_sbp=in_sbp, options=options)
    try:
        return Planned(attempt, drawn, program, program.plan(*args))
    except Exception as e:
        e.add_note(f"attempt {attempt}: {drawn.hierarchy} {drawn.hardware.name} {drawn.in_sbp}")
        raise


def most_split(case: Case, args: Sequence[Any]) -> Planned:
    """Of a few draws the first under which no op runs whole, else the one with the fewest that do."""
    best, fewest = None, (1, 1 << 30)
    for attempt in range(ATTEMPTS):
        found = plan(case, args, attempt)
        physical = found.plan.physical
        assert physical is not None
        split, whole = split_and_whole(physical)
        if best is None or (not split, len(whole)) < fewest:
            best, fewest = found, (not split, len(whole))
        if not whole:
            break
    assert best is not None
    return best


def run_plainly(case: Case, args: Sequence[Any]) -> list[Any]:
    """The results of the function on one device."""
    compiled = jax.jit(case.harness.dyn_fun).lower(*args).compile(HASTY)
    return jax.tree.leaves(jax.block_until_ready(compiled(*args)))


def run_distributed(planned: Planned, args: Sequence[Any]) -> list[Any]:
    """The results of the program on eight devices."""
    physical = planned.plan.physical
    assert physical is not None
    compiled = planned.program.lower(*args).compile(HASTY)
    placed = jax.tree.leaves(planned.program.place(*args))
    return list(jax.block_until_ready(compiled(*placed, *physical.graph.consts)))


def run_case(case: Case) -> Result:
    """Runs one case; whatever goes wrong is in the result."""
    with jax.enable_x64(True):
        start = time.perf_counter()
        fields = _run(case)
        return Result(case.name, case.group, seconds=round(time.perf_counter() - start, 3), **fields)


def _run(case: Case) -> dict[str, Any]:
    if not case.supported:
        limits = "; ".join(limit.description for limit in case.harness.jax_unimplemented)
        return {"status": UNSUPPORTED, "message": limits}
    try:
        args = arguments(case)
        want = run_plainly(case, args)
    except Exception as e:
        return {"status": UNSUPPORTED, "message": f"{type(e).__name__}: {e}"[:500]}
    fields: dict[str, Any] = {}
    phase = "plan"
    try:
        planned = most_split(case, args)
        fields = _described(planned)
        phase = "run"
        got = run_distributed(planned, args)
        phase = "comparison"
        wrong = mismatch(case.group, case.harness.params, jax.tree.leaves(args), got, want)
    except Exception as e:
        return {**fields, "status": FAILED, "message": f"{phase}: {_described_error(e)}"}
    if wrong:
        return {**fields, "status": FAILED, "message": f"mismatch: {wrong}"}
    return fields


def _described(planned: Planned) -> dict[str, Any]:
    """What a record says of a draw and its plan."""
    physical, drawn = planned.plan.physical, planned.draw
    assert physical is not None
    split, whole = split_and_whole(physical)
    return {
        "status": status_of(physical),
        "attempt": planned.attempt,
        "hierarchy": drawn.hierarchy,
        "hardware": drawn.hardware.name,
        "in_sbp": tuple(map(format_sbp, drawn.in_sbp)),
        "split": split,
        "whole": whole,
    }


def _described_error(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"[:1500] + _place(error)
    # JAX adds notes of its own.
    return "; ".join([text, *(n for n in getattr(error, "__notes__", ()) if n.startswith("attempt "))])


def _place(error: Exception) -> str:
    """The innermost line of this repository on the way to an error, outside the tests."""
    root = Path(__file__).resolve().parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_relative_to(root) and path.relative_to(root).parts[0] in ("sbp", "passes", "runtime"):
            return f" at {path.relative_to(root)}:{frame.lineno}"
    return ""
