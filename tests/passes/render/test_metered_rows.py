"""Row by row, what a plan says is sent is what the compiled program sends, to the byte; and why a row is not.

The rule of what XLA may change, which is all that is let pass:

* several rows may be sent by one instruction (combined), or one row by several: then their bytes together;
* a row may be missing if an equal one is sent for both, or if nothing reads it (fates.py says which);
* a row in a loop may be sent before it once, if every trip would send the same.

Kinds are never others, and nothing is sent for no row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.nets import experts
from sbp.passes.face import Plan
from sbp.passes.program.role import Phase
from sbp.runtime.hlo.meter import read_compiled
from sbp.runtime.hlo.origins import rows_of
from sbp.runtime.target.comparison import ComparedProgram, compare
from tests.runtime.pipeline.running import built

LET_PASS = ("removed: equal to", "removed: nothing reads it", "removed: XLA knows the value")


def program_of(case: Case, shape: Sequence[int]) -> ComparedProgram:
    placed = sbp.placement("cpu", shape=tuple(shape))
    program = sbp.compile(case.step, placed, in_sbp=case.in_sbp, donate_argnums=(0, 1))
    args = case.shapes()
    lowered = program.lower(*args)
    return compare(program.plan(*args), lowered.compile(), None, lambda: lowered.as_text(debug_info=True))


def mixture(choice: str, shape: Sequence[int]) -> Case:
    """A mixture of experts, small, with its experts on the devices."""
    params = {
        "gate": jax.ShapeDtypeStruct((16, 8), "float32"),
        "up": jax.ShapeDtypeStruct((8, 16, 32), "float32"),
        "down": jax.ShapeDtypeStruct((8, 32, 16), "float32"),
    }

    def step(params: Any, state: Any, x: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.square(experts(p, x)).mean())(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), state, loss

    split = {"gate": [sbp.B], "up": [sbp.S(0)], "down": [sbp.S(0)]}
    x = jax.ShapeDtypeStruct((8, 16, 16), "float32")
    made = (params, (), x, jax.ShapeDtypeStruct((), "int32"))
    return Case(
        step,
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), made),
        (split, None, [sbp.S(0)], [sbp.B]),
    )


slow = pytest.mark.slow
PROGRAMS: dict[str, tuple[Callable[[str, Sequence[int], int], Case], tuple[int, ...]]] = {
    "gpt/2d": (cases.gpt_case, (2, 4)),
    "gpt/zero": (cases.gpt_case, (8,)),
    "gpt/sequence": (cases.gpt_case, (8,)),
    "mlp/2d": (cases.mlp_case, (2, 4)),
    "mlp/zero": (cases.mlp_case, (8,)),
    "classifier/classes": (cases.classifier_case, (8,)),
    "embedding/rows": (cases.embedding_case, (8,)),
    "embedding/columns": (cases.embedding_case, (8,)),
    "embedding/data": (cases.embedding_case, (8,)),
    "grouped/groups": (cases.grouped_case, (8,)),
    "scan/zero": (cases.scan_case, (8,)),
    "scan/tensor": (cases.scan_case, (8,)),
    "flax/zero": (cases.flax_case, (8,)),
    "equinox/data": (cases.equinox_case, (8,)),
    "mixture/experts": (lambda choice, shape, layers: mixture(choice, shape), (8,)),
    "resnet/data": (cases.resnet_case, (8,)),
}
SLOW = ("gpt/sequence", "gpt/zero", "resnet/data", "equinox/data", "scan/tensor", "embedding/columns")


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=slow) if n in SLOW else n for n in PROGRAMS])
def test_every_row_is_sent_as_said(name: str) -> None:
    make, shape = PROGRAMS[name]
    found = program_of(make(name.partition("/")[2], shape, 2), shape)
    assert found.plan.collectives and not found.unexplained_differences
    rows = {c.name: c for c in found.plan.collectives}
    fates = {fate.row: fate for fate in found.rows}
    for fate in found.rows:
        assert not fate.removed or fate.remark.startswith(LET_PASS), fate
    for own, sent in together(found):
        kept = [rows[r] for r in own if not fates[r].removed]
        assert {c.kind for c in sent} == {c.kind for c in kept}
        hoisted = any("out of its loop" in fates[r].remark for r in own)
        said = math.fsum(c.wire_bytes / (c.count if hoisted else 1) for c in kept)
        assert math.fsum(c.wire_bytes for c in sent) == pytest.approx(said, rel=1e-9), own
        if len(sent) == 1:
            # As often as each of the rows that it is for.
            assert {sent[0].count} == {1 if hoisted else c.count for c in kept}, own
        else:
            assert sum(c.count for c in sent) >= max(c.count for c in kept), own


def together(found: ComparedProgram) -> Iterator[tuple[set[str], list[Any]]]:
    """Rows and instructions that are connected."""
    left = [c for c in found.collectives if not c.conditional]
    while left:
        own, sent = set(left[0].rows), [left.pop(0)]
        while more := [c for c in left if own & set(c.rows)]:
            left = [c for c in left if c not in more]
            sent += more
            own |= {r for c in more for r in c.rows}
        yield own, sent


@pytest.mark.parametrize("name", ["four stages", pytest.param("transformer", marks=slow)])
def test_stages_send_what_their_plans_say(name: str) -> None:
    """Every piece is a program of its own, which runs once, or for every micro-batch."""
    pipeline = built(name, "1f1b")
    times = {Phase.BEFORE: 1, Phase.AFTER: 1}
    for plan, executor in zip(pipeline.plan.stages, pipeline.executor.executors, strict=True):
        sent: dict[str, float] = defaultdict(float)
        named: dict[str, int] = defaultdict(int)
        for part, r in executor.runnables.items():
            n = times.get(part.phase, pipeline.stages.microbatches)
            for kind, (_, wire_bytes) in read_compiled(r.run).by_kind().items():
                sent[kind] += n * wire_bytes
            for rows in rows_of(r.run, plan).values():
                assert rows, part
                for row in rows:
                    named[row.name] += n
        assert sent == pytest.approx(bytes_by_kind(plan), rel=1e-9)
        assert set(named) == {c.name for c in plan.collectives}


def bytes_by_kind(plan: Plan | Any) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for c in plan.collectives:
        found[c.kind] += c.wire_bytes
    return found
