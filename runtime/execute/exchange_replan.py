"""Rooms of sparse exchanges that turned out too small: noticed while a program runs, and planned once more.

The room of an exchange is planned from the first batch. If others are not like it (it was a warm-up with
zeros, say), every step takes many rounds. So programs count their rounds, which the host looks at now and
then, once they are there, and a program whose exchanges took more than two is planned again from the batch
at hand. Once: a batch now and then may take more.

Words: docs/glossary.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from sbp.compat.untyped import Leaf
from sbp.passes.chain import compile_plan
from sbp.passes.face import Plan, with_writer
from sbp.passes.physical.program import Compute
from sbp.passes.program.trace import Traced
from sbp.passes.replan import with_replanner
from sbp.passes.request import Request
from sbp.runtime.lower.key_counts import Counting
from sbp.runtime.lower.sampling import ids_of, lacks_samples, with_samples
from sbp.signature import NdSbp, Split


def rooms_of(plan: Plan, concrete: bool, keys: bool) -> tuple[bool, Counting | None]:
    """Whether a plan waits for a batch to plan rooms from, and what counts its exchanges, if anything does.

    Arguments:
      concrete: whether it was made for a call that will run.
      keys: whether the user has asked for numbers of keys.
    """
    physical = plan.physical
    assert physical is not None
    lacking = not concrete and lacks_samples(physical.graph)
    watches = any(isinstance(step, Compute) and _may_fill(step) for step in physical.steps)
    return lacking, Counting(keys, watches) if keys or watches else None


def _may_fill(step: Compute) -> bool:
    """Whether an op is an exchange whose room the user has not fixed."""
    node = step.node
    is_lookup = bool(ids_of(node)) and Split(0) in step.strategy.operands[0]
    return is_lookup and node.params["capacity"] is None


class ExchangeReplan(Protocol):
    """What is built for one signature of a program, as far as it is planned again here.

    Arguments:
      kept: what the first run has found out of donated memory; None before it.
    """

    plan: Plan
    request: Request | None
    counting: Counting | None
    kept: tuple[int, ...] | None

    @property
    def traced(self) -> Traced:
        """The function's trace."""


def give_room(built: ExchangeReplan, leaves: Sequence[Leaf]) -> None:
    """Plans a program again, once, if its exchanges have had keys for too many rounds, and warns of it.

    State stays where it is: the signatures of arguments and results are those that there were.

    Arguments:
      built: with its plan, its request, its executable and what counts for it.
      leaves: the arguments at hand.
    """
    assert built.counting is not None
    found = built.counting.crowded()
    if not found:
        return
    built.counting.watches = False
    note = "; ".join(f"{n.op} at {n.source} had keys for {rounds} rounds in one step" for n, rounds in found)
    fix = "ExchangeOptions(capacity=...) gives it more"
    if any(node.params["samples"] for node, _ in found):
        note += ": the first batch was not like later ones, and its room was planned again from one of them"
        fix = f"make the first call with a batch like those that follow; {fix}"
        _plan_again(built, leaves, note)
    else:
        note += ": its buffers have an even share and some more, since its ids are not only from arguments"
        built.plan = replace(built.plan, notes=(*built.plan.notes, note))
    warnings.warn(f"sbp: {note}; {fix}", stacklevel=5)


def _plan_again(built: ExchangeReplan, leaves: Sequence[Leaf], note: str) -> None:
    """Another plan for the same program, with the room for a batch."""
    plan, asked, counting = built.plan, built.request, built.counting
    assert asked is not None and counting is not None
    built.request = replace(
        asked,
        in_sbp=_filled(asked.in_sbp, plan.in_sbp),
        out_sbp=_filled(asked.out_sbp, plan.out_sbp),
        notes=(*asked.notes, note),
        sampled=partial(with_samples, example=tuple(leaves), again=True),
    )
    again = with_replanner(compile_plan(built.traced, built.request), built.traced, built.request)
    built.plan = with_writer(again, plan.writer)
    built.counting = counting.onward()
    built.__dict__.pop("executable", None)
    built.kept = None


def _filled(asked: Sequence[NdSbp | None], planned: Sequence[NdSbp]) -> tuple[NdSbp, ...]:
    """What was asked for, and what was chosen where nothing was."""
    return tuple(p if a is None else a for a, p in zip(asked, planned, strict=True))
