"""Lookups in tables that lie alike send their keys in one message, and their rows come back in one.

So do the updates of these tables. A message costs a latency however little it carries, and a model has tables
of many widths. Ops that do not wait for each other come together, behind what any of them waits for
(sbp/communication/joint.py joins what they send).

Keys whose ids come from arguments alone can be sent a step ahead: while a step computes, those of the next
batch travel. What they need of it, the ops from its arrays to the ids, is a part of the program that runs
once more, for the next batch.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sbp.passes.physical.program import (
    Border,
    Compute,
    Physical,
    Step,
    Version,
    barrier_of,
    lowering_group,
    prerequisites,
    writes,
)
from sbp.passes.physical.step_schedule import asked_of
from sbp.passes.program.graph import Const, Operand
from sbp.passes.program.views import communication_of
from sbp.signature import NdSbp


def join_exchanges(physical: Physical) -> Physical:
    """Brings exchanges between the same devices together; the program as it is where there is one at most."""
    steps, number = _joined(physical, physical.steps, 0)
    return replace(physical, steps=steps) if number else physical


def _joined(physical: Physical, steps: Sequence[Step], number: int) -> tuple[tuple[Step, ...], int]:
    """The steps of one body with buckets of exchanges numbered from `number`, and the next free number."""
    out = list[Step]()
    for step in steps:
        if isinstance(step, Border):
            bodies = []
            for body in step.bodies:
                own, number = _joined(physical, body, number)
                bodies.append(own)
            step = replace(step, bodies=tuple(bodies))
        out.append(step)
    kinds = {i: kind for i, step in enumerate(out) if (kind := _kind(physical, step)) is not None}
    while (group := _group(out, kinds)) is not None:
        out, kinds = group.new_order(out, kinds, number)
        number += 1
    return tuple(out), number


def keys_of(physical: Physical, step: Step) -> Hashable | None:
    """Which keys an op sends to the owners of rows; None if none. Ops with equal ones send the same."""
    if not isinstance(step, Compute) or step.node.rule is None or step.node.rule.keys is None:
        return None
    sent = communication_of(physical.graph, step.node, step.strategy.signatures, physical.placement.shape)
    keys = next((c for c in sent if c.kind == "all_to_all"), None)
    return None if keys is None else asked_of(step, keys) or ("own", step.node.id)


def _kind(physical: Physical, step: Step) -> Hashable | None:
    """What exchanges that go together have in common; None for what is none."""
    if not isinstance(step, Compute) or step.node.rule is None or barrier_of(step) >= 0:
        return None
    if step.node.rule.keys is None:
        return None
    sent = communication_of(physical.graph, step.node, step.strategy.signatures, physical.placement.shape)
    kinds = tuple((c.kind, c.axes) for c in sent)
    return (step.node.op, kinds) if any(kind == "all_to_all" for kind, _ in kinds) else None


@dataclass(frozen=True)
class _Group:
    """Exchanges that go together.

    Arguments:
      members: their positions, in order.
      before: the positions of steps behind the first of them that others wait for, in order.
    """

    members: Sequence[int]
    before: Sequence[int]

    def new_order(
        self, steps: Sequence[Step], kinds: dict[int, Hashable], number: int
    ) -> tuple[list[Step], dict[int, Hashable]]:
        """The steps in their new order, and the kinds of exchanges that are still by themselves."""
        first, moved = self.members[0], {*self.members, *self.before}
        members = sorted(self.members, key=lambda i: _order_of(steps[i]))
        behind = [i for i in range(first, len(steps)) if i not in moved]
        order = [*range(first), *self.before, *members, *behind]
        bucketed = {i: replace(step, bucket=number) for i in members if isinstance(step := steps[i], Compute)}
        left = {at: kinds[i] for at, i in enumerate(order) if i in kinds and i not in bucketed}
        return [bucketed.get(i, steps[i]) for i in order], left


def ids_of(step: Compute) -> list[tuple[int, Operand]]:
    """The operands of an op that are ids of rows, with their positions."""
    rule, inputs = step.node.rule, step.node.inputs
    return [(i, inputs[i]) for i in rule.ids(step.node.params, len(inputs))] if rule and rule.ids else []


def _order_of(step: Step) -> tuple[int, ...]:
    """Lookups and updates of the same tables send their keys in one order: that of their ids."""
    assert isinstance(step, Compute)
    return tuple(x for _, x in ids_of(step) if not isinstance(x, Const))


def _group(steps: Sequence[Step], kinds: dict[int, Hashable]) -> _Group | None:
    """The first exchanges that can go together."""
    alike: dict[Hashable, list[int]] = {}
    for i, kind in kinds.items():
        alike.setdefault(kind, []).append(i)
    if all(len(some) == 1 for some in alike.values()):
        return None
    order = _Order(steps)
    waits = order.waits(kinds)
    for some in alike.values():
        for k, first in enumerate(some[:-1]):
            members, before = [first], set[int]()
            for i in some[k + 1 :]:
                needs = order.needs(i, first) if not any(waits[i] >> m & 1 for m in members) else None
                if needs is not None and not needs & {*members}:
                    members.append(i)
                    before |= needs
            if len(members) > 1:
                return _Group(members, sorted(before))
    return None


class _Order:
    """What steps wait for."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps, self.makers = steps, dict[Version, list[int]]()
        for i, step in enumerate(steps):
            for version in writes(step):
                self.makers.setdefault(version, []).append(i)
        self.awaits = [[i for v in prerequisites(step) for i in self.makers.get(v, [])] for step in steps]

    def waits(self, some: Collection[int]) -> list[int]:
        """For which of some steps each waits, itself among them: the bits of a number."""
        found = list[int]()
        for i, makers in enumerate(self.awaits):
            bits = 1 << i if i in some else 0
            for j in makers:
                bits |= found[j] if j < i else 0
            found.append(bits)
        return found

    def needs(self, i: int, first: int) -> set[int] | None:
        """The steps from `first` on that step `i` waits for; None if one of them cannot be moved.

        A version that is made twice has readers of either making: what reads or makes it stays where it is.
        """
        found, ahead = set[int](), [i]
        while ahead:
            for j in self.lowered_with(ahead.pop()):
                step = self.steps[j]
                if any(len(self.makers.get(v, [])) > 1 for v in (*prerequisites(step), *writes(step))):
                    return None
                new = {m for m in self.awaits[j] if m >= first} - found
                found |= new | ({j} - {i})
                ahead += new
        return found

    def lowered_with(self, i: int) -> Iterator[int]:
        """The steps that a step is lowered with, itself among them."""
        group = lowering_group(self.steps[i])
        if group is None:
            return iter((i,))
        return (j for j, step in enumerate(self.steps) if lowering_group(step) == group)


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
        self.consts = {*range(len(graph.inputs) - len(graph.consts), len(graph.inputs))}
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
