"""Which keys can be sent a step ahead: those whose ids come from arguments alone.

While a step computes, the keys of the next batch travel. What they need of it, the ops from its arrays to the
ids, is a part of the program that runs once more, for the next batch.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from sbp.passes.physical.exchanges import ids_of, keys_of
from sbp.passes.physical.program import (
    Border,
    Compute,
    Physical,
    Step,
    Version,
    barrier_of,
    prerequisites,
    writes,
)
from sbp.passes.program.graph import Const, Operand
from sbp.signature import NdSbp


@dataclass(frozen=True)
class ReadAhead:
    """What is done of the next batch.

    Arguments:
      senders: of the keys that are sent, each once.
      steps: the steps that make the ids.
      inputs: positions of the arguments that the ids come from.
    """

    senders: Mapping[Hashable, Compute]
    steps: tuple[Step, ...]
    inputs: tuple[int, ...]


def find_read_ahead(physical: Physical, arguments: int, donated: Collection[int] = ()) -> ReadAhead | None:
    """The keys that can be sent a step ahead; None if there are none.

    Keys of a loop, those that come from another table, and those that come from what the step changes cannot.

    Arguments:
      arguments: how many inputs are arguments; the others are arrays that the function closes over.
      donated: positions of arguments that the step replaces.
    """
    origins = _Origins(physical, {*range(arguments)} - {*donated})
    senders, steps, inputs = dict[Hashable, Compute](), set[int](), set[int]()
    for step in physical.steps:
        keys = keys_of(physical, step)
        if isinstance(step, Compute) and keys is not None and keys not in senders:
            made = origins.of([(x, step.strategy.operands[i]) for i, x in ids_of(step)])
            if made is not None:
                senders[keys] = step
                steps |= made[0]
                inputs |= made[1]
    some = tuple(physical.steps[i] for i in sorted(steps))
    return ReadAhead(senders, some, tuple(sorted(inputs))) if senders and inputs else None


class _Origins:
    """What versions are made from.

    Arguments:
      known: positions of the inputs that are known of the next step, or are the same in each.
    """

    def __init__(self, physical: Physical, known: Collection[int]) -> None:
        self.physical, self.steps, self.makers = physical, physical.steps, dict[Version, list[int]]()
        graph = physical.graph
        self.inputs = {v: i for i, v in enumerate(zip(graph.inputs, physical.inputs, strict=True))}
        consts = range(len(graph.inputs) - len(graph.consts), len(graph.inputs))
        self.consts = {*consts}
        self.known = {*known} | self.consts
        for i, step in enumerate(physical.steps):
            for version in writes(step):
                self.makers.setdefault(version, []).append(i)

    def of(self, versions: Sequence[tuple[Operand, NdSbp]]) -> tuple[set[int], set[int]] | None:
        """The steps that make some versions, and the arguments that they begin with.

        None if one of them sends keys, is made twice, or begins with what is not known of the next step.
        """
        steps, inputs, ahead = set[int](), set[int](), [*versions]
        while ahead:
            value, nd = ahead.pop()
            if isinstance(value, Const):
                continue
            makers = self.makers.get((value, nd), [])
            if not makers:
                at = self.inputs[value, nd]
                if at not in self.known:
                    return None
                inputs |= {at} - self.consts
            elif len(makers) > 1 or not self.may_run_again(self.steps[makers[0]]):
                return None
            elif makers[0] not in steps:
                steps.add(makers[0])
                ahead += prerequisites(self.steps[makers[0]])
        return steps, inputs

    def may_run_again(self, step: Step) -> bool:
        """Whether a step is by itself, and cheap enough to be done for two batches."""
        by_itself = not isinstance(step, Border) and step.bucket < 0 and barrier_of(step) < 0
        return by_itself and keys_of(self.physical, step) is None
