"""In which type moves send."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import sbp
from sbp import B, S
from sbp.passes.boxing.links import Network
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Box

N = 4


def sent(fn: Any, *args: Any, in_sbp: Any, out_sbp: Any) -> list[tuple[str, str, float]]:
    """Kind, type and bytes of what a program sends."""
    program = sbp.compile(fn, sbp.placement("cpu", shape=(N,)), in_sbp=in_sbp, out_sbp=out_sbp)
    plan = program.plan(*args)
    assert plan.physical is not None
    takes = Evaluator(plan.physical, Network(plan.placement, plan.hardware))
    boxes: list[Box] = [box for box, _ in plan.physical.boxes() if takes.box_bytes(box) > 0]
    assert [takes.box_bytes(b) for b in boxes] == [c.wire_bytes for c in plan.collectives]
    return [(b.move.kind, str(plan.physical.sent(b)[1]), takes.box_bytes(b)) for b in boxes]


def test_what_was_widened_is_sent_as_it_was() -> None:
    def fn(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return wide, wide

    x = np.ones((64, 64), np.float16)
    assert sent(fn, x, in_sbp=[S(0)], out_sbp=[[S(0)], [B]]) == [
        ("all_gather", "float16", (N - 1) * 16 * 64 * 2)
    ]


def test_a_sum_of_what_was_widened_is_added_up_wide() -> None:
    """Once added up it may hold more than the narrow type."""
    x = np.ones((64, 64), np.float16)
    ((kind, dtype, _),) = sent(lambda x: x.astype(jnp.float32).sum(0), x, in_sbp=[S(0)], out_sbp=[B])
    assert (kind, dtype) == ("all_reduce", "float32")


def test_the_loop_sends_what_was_widened_inside() -> None:
    """A body of a loop is told too."""

    def fn(x: Any, w: Any) -> Any:
        def body(c: Any, w: Any) -> Any:
            return jnp.tanh(c @ w.astype(jnp.float32)), None

        return lax.scan(body, x, w)[0]

    x, w = np.ones((64, 256), np.float32), np.ones((3, 256, 256), np.float16)
    found = sent(fn, x, w, in_sbp=[[S(0)], [S(1)]], out_sbp=[S(0)])
    assert {(kind, dtype) for kind, dtype, _ in found} == {("all_gather", "float16")}


def test_a_plan_without_conversions_is_told_nothing() -> None:
    x = np.ones((64, 64), np.float32)
    assert sent(lambda x: x * 2, x, in_sbp=[S(0)], out_sbp=[B]) == [
        ("all_gather", "float32", (N - 1) * 16 * 64 * 4)
    ]
