"""What a program costs as a plan says it, and what of a tensor's makers it says."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain.choices import PlanFigures
from sbp.passes.explain.collectives import communicating
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.evaluate import OVERLAPPING, Evaluator
from sbp.passes.physical.program import Box, Flow, Physical
from sbp.passes.plan.bounds import least_kernel_seconds
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.record import ChoiceRecord
from sbp.signature import format_sbp


def figures_of(plan: PlanData) -> PlanFigures:
    """What a plan costs."""
    return PlanFigures(plan.seconds, plan.step_seconds, plan.wire_bytes, plan.memory_bytes)


def evaluated(physical: Physical, network: Network, donated: Sequence[int]) -> PlanFigures:
    """What a program costs."""
    takes = Evaluator(physical, network, donated)
    sent = sum(
        how.times * (takes.box_bytes(what) if isinstance(what, Box) else what.communication.wire_bytes)
        for what, how in communicating(physical)
    )
    return PlanFigures(takes.seconds(), takes.scheduled().seconds, sent, takes.peak_bytes())


def proven(
    plan: PlanData,
    choice: ChoiceRecord,
    candidates: Candidates,
    boxings: Boxings,
    cheapest_seconds: float | None,
) -> PlanData:
    """A plan with its choice, and what is proven of it."""
    overlaps = boxings.network.hardware.platform in OVERLAPPING
    step_bound = least_kernel_seconds(candidates, boxings) if overlaps else choice.bound
    return replace(
        plan, bound=choice.bound, step_bound=step_bound, choice=choice, cheapest_seconds=cheapest_seconds
    )


def made_by(physical: Physical, values: Sequence[int]) -> str:
    """The op that makes some values, and its signatures; several, where not all have the same."""
    makers = Flow(physical).makers
    texts = []
    for v in values:
        if v in makers:
            node, s = makers[v]
            ends = (", ".join(map(format_sbp, lying)) for lying in s.lying)
            texts.append(f"{node.op} at {node.source} as {' -> '.join(ends)}")
    every = dict.fromkeys(texts)
    more = [f"{len(every) - 2} other ways"] if len(every) > 2 else []
    return "; ".join([*itertools.islice(every, 2), *more])
