"""What of its collectives a step waits for, and a planning problem in which each counts with that share.

The search adds up costs of ops and of moves; what a move delays, with collectives beside kernels, depends on
all others. So a plan is run as XLA:GPU would (step_schedule.py), each move counts from then on with the part
of it that was exposed, and the problem is solved again.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.buckets import bucket_collectives
from sbp.passes.physical.evaluate import Evaluator, StepFacts, executions
from sbp.passes.physical.insert import Computes, insert_boxing
from sbp.passes.physical.owners import mark_owners
from sbp.passes.physical.program import Box, Compute
from sbp.passes.plan import constants
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cost import sent_seconds
from sbp.passes.plan.folding import key_numbers
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork, Table
from sbp.passes.program.graph import Graph, Node

Shares = Mapping[Hashable, float]
"""Per group of moves that look alike, what part of them counts."""


@dataclass(frozen=True)
class StepTimes:
    """What a plan takes.

    Arguments:
      step_seconds, seconds: in XLA's own order, with the copies at its end and what it takes beyond the
        program; and one thing after the other.
      sent_seconds, exposed_seconds: seconds per value that is moved, and what of them kernels wait.
      body_sent_seconds, body_exposed_seconds: likewise per node that sends itself.
    """

    step_seconds: float
    seconds: float
    sent_seconds: Mapping[int, float] = field(repr=False)
    exposed_seconds: Mapping[int, float] = field(repr=False)
    body_sent_seconds: Mapping[int, float] = field(repr=False)
    body_exposed_seconds: Mapping[int, float] = field(repr=False)


@dataclass(frozen=True)
class Clock:
    """Says what the plans of one program take.

    Arguments:
      candidates, boxings: of the search.
      computes, facts: of all plans.
    """

    candidates: Candidates
    boxings: Boxings
    computes: Computes = field(default_factory=dict, repr=False)
    facts: StepFacts = field(default_factory=StepFacts, repr=False)

    def program(self, assignment: ChosenSignatures, donated: Sequence[int] = ()) -> Evaluator:
        """The program of a plan as the chain makes it, with what it takes.

        Arguments:
          donated: positions of the inputs whose memory the results may take.
        """
        given = self.candidates, assignment, self.boxings
        placed = mark_owners(insert_boxing(*given, computes=self.computes))
        physical = bucket_collectives(placed, self.boxings.network.hardware)
        is_plain = physical.graph is self.candidates.graph
        facts = self.facts if is_plain else replace(self.facts, shard_bytes={})
        return Evaluator(physical, self.boxings.network, donated, facts)

    def times(self, assignment: ChosenSignatures) -> StepTimes:
        """What a plan takes."""
        return self.times_of(self.program(assignment), assignment.beyond_seconds)

    def times_of(self, takes: Evaluator, beyond_seconds: float) -> StepTimes:
        """What a program takes.

        Arguments:
          beyond_seconds: what others take for what it sends and is sent.
        """
        run = takes.schedule
        sent, exposed, talked, waited = (defaultdict[int, float](float) for _ in range(4))
        # What ops that run again make is none of the program's values: the search has other ids for it.
        known, serial = len(self.candidates.graph.values), 0.0
        for e in executions(takes.physical.steps):
            serial += e.assumed_count * takes.seconds_of(e.step)
            if isinstance(e.step, Box):
                if takes.box_bytes(e.step) > 0 and e.step.value < known:
                    sent[e.step.value] += e.assumed_count * takes.seconds_of(e.step)
                    exposed[e.step.value] += run.exposed_of(e.step)
            elif isinstance(e.step, Compute):
                for k, (_, seconds) in enumerate(takes.communication_times(e.step)):
                    talked[e.step.node.id] += e.assumed_count * seconds
                    waited[e.step.node.id] += run.exposed_of(e.step, k)
        return StepTimes(run.seconds + beyond_seconds, serial, sent, exposed, talked, waited)


class Exposure:
    """The cost network of a built model, with each move counting in part.

    Moves that look alike are one group: of values made in the same phase of the step, with one cost table.
    Equal layers have equal groups then, and the solver's work on one layer serves all of them; and what a
    group's moves find is what the alternatives of the same values would find, which leave at the same time.
    """

    def __init__(self, model: Model, network: CostNetwork) -> None:
        self.model, self.network = model, network
        self.phases = phases_of(model.graph) | _phases_of_later(model)
        self.groups: list[Hashable] = [
            (id(table), self.phases[v])
            for (_, _, table), v in zip(network.edges, model.edge_values, strict=True)
        ]
        self.values: dict[Hashable, set[int]] = defaultdict(set)
        for group, v in zip(self.groups, model.edge_values, strict=True):
            self.values[group].add(v)
        self.tables = {g: t for g, (_, _, t) in zip(self.groups, network.edges, strict=True)}
        self.kinds = key_numbers(self.groups)
        self.communicating = self._communicating()

    def _communicating(self) -> dict[int, tuple[Node, Table]]:
        """Per variable of an op that may send: the op, and what it sends in each state."""
        m, known, found = self.model, dict[Hashable, Table](), dict[int, tuple[Node, Table]]()
        for node in m.graph.walk():
            if node.id in m.nodes and node.rule is not None and node.rule.communication is not None:
                variable = m.nodes[node.id]
                key = id(m.states[variable]), id(m.unary[variable])
                if key not in known:
                    # A table has its op's launches, loops and all: what is sent is part of it as often.
                    times = m.supply[node.outputs[0]].times
                    sent = (sent_seconds(m.graph, node, s, m.boxings.network) for s in m.states[variable])
                    known[key] = times * np.array(list(sent))
                if known[key].any():
                    found[variable] = node, known[key]
        return found

    def shares(
        self,
        times: StepTimes,
        before: Shares | None = None,
        damping: float = constants.DAMPING,
        *,
        by_phase: bool = False,
    ) -> Shares:
        """What part of its moves each group shall count.

        Arguments:
          times: of the plan that was found last.
          before: the shares that it was found with; None for 1.0 each.
          damping: how much of them stays.
          by_phase: whether moves of one phase have one share. What of a phase is exposed changes little from
            plan to plan, and which of its moves that is much.
        """
        sent, exposed = defaultdict[Hashable, float](float), defaultdict[Hashable, float](float)
        for v, seconds in times.sent_seconds.items():
            sent[self.phases[v]] += seconds
            exposed[self.phases[v]] += times.exposed_seconds[v]
        found: dict[Hashable, float] = {}
        for group, values in self.values.items():
            phase = self.phases[next(iter(values))]
            own = 0.0 if by_phase else sum(times.sent_seconds.get(v, 0.0) for v in values)
            waits = sum(times.exposed_seconds.get(v, 0.0) for v in values)
            usual = exposed[phase] / sent[phase] if sent[phase] else constants.UNSEEN_SHARE
            found[group] = waits / own if own else usual
        for variable, (node, _) in self.communicating.items():
            own = times.body_sent_seconds.get(node.id, 0.0)
            found["talk", variable] = (
                times.body_exposed_seconds[node.id] / own if own else constants.UNSEEN_SHARE
            )
        old = before or {}
        return {
            g: damping * old.get(g, 1.0) + (1.0 - damping) * min(1.0, share) for g, share in found.items()
        }

    def parts(self, shares: Shares) -> Table:
        """What part of their tables counts, per kind of edges."""
        return np.array([shares[g] for g in self.tables])

    def weighted_network(self, shares: Shares, unary: Sequence[Table]) -> CostNetwork:
        """The network with these shares; tables of one group stay one object.

        Arguments:
          unary: the costs of states, with those infinite that are not wanted.
        """
        # What is forbidden stays so.
        tables = {g: np.where(np.isinf(table), table, table * shares[g]) for g, table in self.tables.items()}
        edges = tuple(
            (i, j, tables[group]) for group, (i, j, _) in zip(self.groups, self.network.edges, strict=True)
        )
        return CostNetwork(self.weighted_unary(shares, unary), edges)

    def weighted_unary(self, shares: Shares, unary: Sequence[Table]) -> tuple[Table, ...]:
        """The costs of its states."""
        thetas, known = list(unary), dict[Hashable, Table]()
        for variable, (_, sent) in self.communicating.items():
            own, share = thetas[variable], round(shares["talk", variable], 6)
            key = id(own), id(sent), share
            if key not in known:
                known[key] = own - (1.0 - share) * sent
            thetas[variable] = known[key]
        return tuple(thetas)


def _phases_of_later(model: Model) -> dict[int, str]:
    """The same of the values that stand for later uses of others (plan/recompute.py): when they are used."""
    roles, made = {n.id: n.role.direction for n in model.graph.nodes}, phases_of(model.graph)
    found = dict[int, str]()
    for v in (x for x in dict.fromkeys(model.edge_values) if x not in made):
        users = [u.user for u in model.demand.get(v, ()) if u.user in roles]
        found[v] = roles[min(users)] if users else "backward"
    return found


def phases_of(graph: Graph) -> dict[int, str]:
    """Per value when it is made: "given", in the "forward" or the "backward" pass, or "" else. What is
    made in a loop or a branch hides there what is sent, and has a phase of its own."""
    found, inside = dict.fromkeys(graph.inputs, "given"), dict[int, str]()
    for node in graph.walk():
        found.update(dict.fromkeys(node.outputs, node.role.direction + inside.get(node.id, "")))
        for k, body in enumerate(node.bodies):
            own = f" in body {k} of {node.id}"
            found.update(dict.fromkeys(body.inputs, node.role.direction + own))
            inside.update((n.id, own) for n in body.nodes)
    return found
