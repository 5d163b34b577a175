"""Plans a program again if its sparse exchanges take many rounds.

The capacity of an exchange is planned from the first batch. If later batches differ (the first was a warm-up
with zeros, say), every step takes many rounds. So a program counts its rounds, and the host reads the counts
now and then, when they are there. If an exchange took more than two rounds, the program is planned once more,
with the batch at hand. It happens only once, since single batches may take more.

Words: docs/glossary.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from sbp.compat.untyped import Leaf
from sbp.passes.chain import compile_plan
from sbp.passes.face import Plan, with_writer
from sbp.passes.physical.program import Compute
from sbp.passes.program.trace import TracedProgram
from sbp.passes.replan.replanner import with_replanner
from sbp.passes.request import Request
from sbp.runtime.lower.key_counts import KeyCounts
from sbp.runtime.lower.sampling import ids_of, lacks_samples, with_samples
from sbp.signature import NdSbp, Split
from sbp.text.user_warnings import warn_user


def counting_of(plan: Plan, concrete: bool, keys: bool) -> tuple[bool, KeyCounts | None]:
    """Whether a plan waits for a batch to plan capacities from, and the counter of its exchanges or None.

    Arguments:
      concrete: whether it was made for a call with values.
      keys: whether the user asked for counts of keys.
    """
    physical = plan.physical
    assert physical is not None
    lacking = not concrete and lacks_samples(physical.graph)
    watches = any(isinstance(step, Compute) and _may_fill(step) for step in physical.steps)
    return lacking, KeyCounts(keys, watches) if keys or watches else None


def _may_fill(step: Compute) -> bool:
    """Whether an op is an exchange whose capacity the user has not fixed."""
    node = step.node
    is_lookup = bool(ids_of(node)) and Split(0) in step.strategy.operands[0]
    return is_lookup and node.params["capacity"] is None


class ExchangeReplan(Protocol):
    """The part of a compiled signature that is needed to plan it again.

    Arguments:
      kept_donations: what the first run found out about donated memory; None before it.
    """

    plan: Plan
    request: Request | None
    key_counts: KeyCounts | None
    kept_donations: tuple[int, ...] | None

    @property
    def traced(self) -> TracedProgram:
        """The function's trace."""


def replan(built: ExchangeReplan, leaves: Sequence[Leaf]) -> None:
    """Plans a program again, once, if its exchanges took many rounds, and warns.

    The state stays where it is: arguments and results keep their signatures.

    Arguments:
      built: a compiled signature with its plan, request, executable and counter.
      leaves: the arguments at hand.
    """
    assert built.key_counts is not None
    found = built.key_counts.crowded_exchanges()
    if not found:
        return
    built.key_counts.watches = False
    note = "; ".join(f"{n.op} at {n.source} had keys for {rounds} rounds in one step" for n, rounds in found)
    fix = "ExchangeOptions(capacity=...) gives it more"
    if any(node.params["samples"] for node, _ in found):
        note += ": the first batch was not like later ones, its capacity was planned again from one of them"
        fix = f"make the first call with a batch like those that follow; {fix}"
        _plan_again(built, leaves, note)
    else:
        note += ": its buffers have an even share and some more, since its ids are not only from arguments"
        built.plan = replace(built.plan, notes=(*built.plan.notes, note))
    warn_user(f"{note}; {fix}")


def _plan_again(built: ExchangeReplan, leaves: Sequence[Leaf], note: str) -> None:
    """Another plan of the same program, with capacities for a batch."""
    plan, asked, counting = built.plan, built.request, built.key_counts
    assert asked is not None and counting is not None
    built.request = replace(
        asked,
        in_sbp=_filled(asked.in_sbp, plan.in_sbp),
        out_sbp=_filled(asked.out_sbp, plan.out_sbp),
        notes=(*asked.notes, note),
        with_sample=partial(with_samples, example=tuple(leaves), again=True),
    )
    again = with_replanner(compile_plan(built.traced, built.request), built.traced, built.request)
    built.plan = with_writer(again, plan.writer)
    built.key_counts = counting.onward()
    for made in ("executable", "keys_ahead"):
        built.__dict__.pop(made, None)
    built.kept_donations = None


def _filled(asked: Sequence[NdSbp | None], planned: Sequence[NdSbp]) -> tuple[NdSbp, ...]:
    """The requested signatures, and the planned ones where none was requested."""
    return tuple(p if a is None else a for a, p in zip(asked, planned, strict=True))
