"""What a program costs as a plan says it, and what of a tensor's makers it says."""

import itertools
from collections.abc import Sequence

from sbp.passes.boxing.links import Network
from sbp.passes.explain.choices import PlanFigures
from sbp.passes.explain.collectives import communicating
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.flow import Flow
from sbp.passes.physical.program import Box, Physical
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
