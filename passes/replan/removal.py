"""What else the tensors of the costliest collectives could lie as, and what to write to do without these.

First a plan without the collective is looked for, near the one at hand (near.py): no move of its kind may
bring its tensors anywhere. How tensors lie in that plan is what a user may write: of those that leave a line
of the forward, of gradients as `jax.grad` returns them, of arguments. Each of them is held alone, then two at
a time, and everything else near is chosen anew. What is told was then planned again as a whole, where there
was time, and the collective looked for in that plan.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sbp.compat.exact_keys import memo
from sbp.errors import SbpError
from sbp.passes.explain.choices import (
    HeldPlan,
    HeldTensor,
    Removal,
    RowChoices,
    SentAt,
    TensorChoices,
)
from sbp.passes.explain.collectives import InnerCollective
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.plan_figures import (
    figures_of,
    figures_of_program,
    hold_text,
    is_gone,
    made_by,
    moves_of,
    sent_at,
)
from sbp.passes.explain.targets import Target
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.program import Box, Physical
from sbp.passes.plan.effort import Effort, until_over
from sbp.passes.plan.marginals import HeldSolutions, HeldStates, cheapest_held
from sbp.passes.replan.line_targets import LineTargets
from sbp.passes.replan.near_problem import Ban, NearNetwork, NearProblem
from sbp.passes.request import Request
from sbp.signature import NdSbp

Hold = tuple[Target, NdSbp]
"""A target, and what it is held to."""
ROUNDS = 6
"""Tensors to which a collective may move before a plan without it is given up."""
MOST_SINGLE, MOST_PAIRED, MOST_FOUND = 12, 6, 2
"""Tensors that are held alone, of how many of them two are held together, and ways that are enough."""
MOST_WHOLE = 4
"""Plans that are made as a whole to see that a collective is gone."""
SOLVE_SECONDS = 5.0
NOWHERE = "no signatures of the ops near it do without it: it moves elsewhere"
NOT_BY_TWO = "a plan without it exists, but fixing one or two tensors does not lead to it"
NO_TIME = "there was no time to look further"
NOT_WHOLE = "the change removes it from a nearby plan, but not when the whole program is planned again"


@dataclass
class RowsSearch:
    """The search for some rows of a plan.

    Arguments:
      s: the plan's graph with an annotation that says nothing behind each watched value.
      problem: of it.
      lines: what can be held near each row.
      own: per row, its own tensors and the argument that leads to it.
      free_arguments: arguments of which nothing is said in `problem`, by position.
      make_plan: makes the whole plan with some tensors held.
    """

    plan: PlanData
    request: Request
    problem: NearProblem
    lines: LineTargets
    own: Sequence[Sequence[Target]]
    rows: Sequence[Collective]
    free_arguments: Sequence[int]
    make_plan: Callable[[Sequence[Hold]], PlanData]
    effort: Effort = field(default_factory=Effort)

    @cached_property
    def clock(self) -> Clock:
        """Makes the programs of plans near."""
        return Clock(self.problem.s.candidates, self.problem.s.boxings)

    @cached_property
    def physical(self) -> Physical:
        """The plan's program."""
        assert self.plan.physical is not None
        return self.plan.physical

    def each(self, most: int, time_limit_seconds: float) -> Iterator[tuple[Collective, RowChoices]]:
        """What was found for each row, as long as there is time."""
        self.effort = until_over(time_limit_seconds)
        found = list[tuple[TensorChoices, ...]]()
        # What all rows could be first: to do without one takes longer.
        for k in range(len(self.rows)):
            if self.effort.is_spent:
                break
            found.append(tuple(self.tensor(k, target, most) for target in self.own[k]))
        for k, tensors in enumerate(found):
            removal = Removal(remark=NO_TIME) if self.effort.is_spent else self.removal(k, tensors)
            yield self.rows[k], RowChoices(tensors, removal)

    # One row.

    @memo
    def network_around(self, k: int) -> NearNetwork:
        """What is near a row."""
        return self.problem.network_around(self._free(k), Ban())

    def _free(self, k: int) -> set[int]:
        values = {w.value if isinstance(w, Box) else w.step.node.outputs[0] for w in self._moves(k)}
        held = [
            x
            for target in (*self.own[k], *self.lines.targets_near[k])
            for x in self.problem.variables(target)
        ]
        opened = [self.problem.model.inputs[i] for i in self.free_arguments]
        return self.problem.variables_near(self.problem.of_values(values)) | set(held) | set(opened)

    def _moves(self, k: int) -> list[Box | InnerCollective]:
        """All that is sent as a row is: of its kind, at its line, of its shape."""
        key = _key(self.rows[k])
        return [what for c in self.plan.collectives if _key(c) == key for what in moves_of(self.physical, c)]

    def states(self, *holds: Hold) -> HeldStates:
        """The states that hold some targets; what else is open of arguments stays."""
        m, found = self.problem.model, dict[int, int]()
        for i in self.free_arguments:
            found[m.inputs[i]] = self.problem.plan_states[m.inputs[i]]
        for target, nd in holds:
            found |= self.problem.held_states(target, nd)
        return found

    def tensor(self, k: int, target: Target, most: int) -> TensorChoices:
        """The other signatures of a tensor of a row."""
        others = self.problem.others(target)
        around = self.network_around(k)
        asked = [self.states((target, nd)) for nd in others]
        found = cheapest_held(around.network, asked, most, Effort().at_most(SOLVE_SECONDS))
        plans = [self._plan(others[i], around.whole(x.states), target) for i, x in found.solutions]
        return tensor_choices(self.plan, target, found, plans, self.request.limit_bytes, near=True)

    def _plan(self, nd: NdSbp, states: Sequence[int], target: Target) -> HeldPlan:
        takes = self.program(states)
        made = made_by(takes.physical, [self.problem.annotated_values[v] for v in target.values])
        return HeldPlan(nd, figures_of_program(takes), made, 0.0, sent_at(takes))

    def program(self, states: Sequence[int]) -> Evaluator:
        """The program that states of all variables mean."""
        return self.clock.program(
            self.problem.model.chosen_signatures(states, 0.0, 0.0), self.request.donated
        )

    # To do without it.

    def removal(self, k: int, tensors: Sequence[TensorChoices]) -> Removal:
        """What to write to do without a row."""
        tried, remark = set[tuple[object, ...]](), NOWHERE
        for ways in self._each_way(k, tensors):
            for holds, states in ways:
                key = tuple((t.text, nd) for t, nd in holds)
                if key in tried or len(tried) >= MOST_WHOLE:
                    continue
                tried.add(key)
                if self.effort.is_spent:
                    takes = self.program(states)
                    return Removal(self._held(holds), figures_of_program(takes), sent_at(takes))
                if (found := self._whole(k, holds)) is not None:
                    return found
            remark = NOT_WHOLE if tried else NOT_BY_TWO
        return Removal(remark=NO_TIME if self.effort.is_spent else remark)

    def _each_way(
        self, k: int, tensors: Sequence[TensorChoices]
    ) -> Iterator[Sequence[tuple[Sequence[Hold], Sequence[int]]]]:
        """Ways to do without a row, those by which fewer is held and changed first."""
        own = list[Sequence[Hold]]()
        for target, choices in zip(self.own[k], tensors, strict=True):
            if choices.hold[0] != "backward" and self.lines.is_line(target):
                own += [((target, h.signature),) for h in choices.alternatives if self._gone(k, h.sent_at)]
        if own:
            yield self._tried(k, own)
        # At last arguments near may lie otherwise than they do.
        for held in (self.states(), {}):
            goal = self._without(k, held)
            if goal is not None:
                near = self.lines.targets_near[k]
                holds = [(t, nd) for t in near if (nd := self._lies(t, goal)) is not None]
                yield self._tried(k, [(hold,) for hold in holds[:MOST_SINGLE]])
                yield self._tried(k, list(itertools.combinations(holds[:MOST_PAIRED], 2)))

    def _gone(self, k: int, sent: Sequence[SentAt] | None) -> bool:
        return is_gone(self.rows[k], sent, self.plan)

    def _tried(self, k: int, each: Sequence[Sequence[Hold]]) -> list[tuple[Sequence[Hold], Sequence[int]]]:
        """Of some ways those that do without a row, the cheapest first."""
        found = list[tuple[float, int, Sequence[Hold], Sequence[int]]]()
        for n, holds in enumerate(each):
            if len(found) == MOST_FOUND or self.effort.is_spent:
                break
            solved = self.network_around(k).solve(self.states(*holds), Effort().at_most(SOLVE_SECONDS))
            if solved is not None and self._gone(k, sent_at(self.program(solved[0]))):
                found.append((solved[1], n, holds, solved[0]))
        return [(holds, states) for _, _, holds, states in sorted(found, key=lambda x: x[:2])]

    def _without(self, k: int, held: HeldStates) -> Sequence[int] | None:
        """The cheapest plan near that does without a row; None if none was found."""
        free, more = self._free(k), self._banned(self._moves(k))
        banned = Ban()
        for _ in range(ROUNDS):
            if banned == banned | more or self.effort.is_spent:
                break
            banned |= more
            solved = self.problem.network_around(free, banned).solve(held, Effort().at_most(SOLVE_SECONDS))
            if solved is None:
                break
            takes = self.program(solved[0])
            if self._gone(k, sent_at(takes)):
                return solved[0]
            more = self._banned(self._elsewhere(k, takes.physical))
        return None

    def _elsewhere(self, k: int, physical: Physical) -> list[Box | InnerCollective]:
        """What a program sends in place of a row: of its kind and its shape, at lines that sent none."""
        row = self.rows[k]
        before = {_key(c) for c in self.plan.collectives} - {_key(row)}
        found = list[Box | InnerCollective]()
        for what, source in self.lines.sends_by_line(physical):
            if isinstance(what, Box):
                key = what.move.kind, source, tuple(physical.sent_type(what)[0])
                if key[0] == row.kind and key[2] == row.shape and key not in before:
                    found.append(what)
        return found

    def _banned(self, whats: Sequence[Box | InnerCollective]) -> Ban:
        fresh = {x: v for v, x in self.problem.annotated_values.items()}
        moves = {(w.move.kind, fresh.get(w.value, w.value)) for w in whats if isinstance(w, Box)}
        inside = {
            (w.communication.kind, w.step.node.outputs[0])
            for w in whats
            if not isinstance(w, Box) and w.step.node.outputs
        }
        return Ban(frozenset(moves), frozenset(inside))

    def _lies(self, target: Target, states: Sequence[int]) -> NdSbp | None:
        """How all of a target lies in a plan; None if not all lie alike."""
        lying = {self.problem.state_signatures(x)[states[x]] for x in self.problem.variables(target)}
        return lying.pop() if len(lying) == 1 else None

    def _held(self, holds: Sequence[Hold]) -> tuple[HeldTensor, ...]:
        return tuple(HeldTensor(t.text, *hold_text(self.plan, self.physical, t), nd) for t, nd in holds)

    def _whole(self, k: int, holds: Sequence[Hold]) -> Removal | None:
        """The same planned as a whole; None if the row is there again."""
        try:
            plan = self.make_plan(holds)
        except SbpError:
            return None
        assert plan.physical is not None
        sent = sent_at(Evaluator(plan.physical, self.clock.boxings.network, self.request.donated))
        return Removal(self._held(holds), figures_of(plan), sent, whole=True) if self._gone(k, sent) else None


def tensor_choices(
    plan: PlanData,
    target: Target,
    found: HeldSolutions,
    plans: Sequence[HeldPlan],
    limit_bytes: float,
    near: bool = False,
) -> TensorChoices:
    """What else a tensor of a plan could lie as.

    Arguments:
      plans: of what was found.
      near: whether all that is far off stays as planned.
    """
    assert plan.physical is not None
    return TensorChoices(
        target.text,
        target.count,
        made_by(plan.physical, target.values),
        target.signatures,
        figures_of(plan),
        tuple(sorted(plans, key=lambda h: (h.figures.step_seconds, h.figures.seconds))),
        found.slower,
        found.unknown,
        found.impossible,
        limit_bytes,
        hold=hold_text(plan, plan.physical, target),
        near=near,
    )


def _key(c: Collective) -> tuple[str, str, tuple[int, ...]]:
    return c.kind, c.source, c.shape
