"""What must hold between passes: checked after each of them, unless `Options(check=False)` says otherwise."""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import ParamSpec

from sbp.passes.boxing.paths import Boxing, Boxings
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.program import Border, Box, Physical, Step, Version, reads, writes
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.model import ChosenSignatures, boxing_of
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Graph, Node
from sbp.signature import NdSbp, P, Split

Args = ParamSpec("Args")


class SpecError(AssertionError):
    """A pass broke its contract: a bug in the compiler, not in the user's program."""


def contract(what: str) -> Callable[[Callable[Args, Iterator[str]]], Callable[Args, None]]:
    """Makes a check of what yields the problems of something: it raises them all."""

    def check_of(problems: Callable[Args, Iterator[str]]) -> Callable[Args, None]:
        @wraps(problems)
        def check(*args: Args.args, **named: Args.kwargs) -> None:
            if found := list(problems(*args, **named)):
                raise SpecError(f"{what}:\n  " + "\n  ".join(found))

        return check

    return check_of


@contract("the logical graph")
def check_graph(graph: Graph) -> Iterator[str]:
    """Every value is made once, before it is used; ids are positions."""
    made = set(graph.inputs)
    for i, value in enumerate(graph.values):
        if value.id != i:
            yield f"value {value} stands at position {i} with id {value.id}"
    for i, node in enumerate(graph.nodes):
        if node.id != i:
            yield f"node {node.op} stands at position {i} with id {node.id}"
    if len({n.id for n in graph.walk()}) != sum(1 for _ in graph.walk()):
        yield "two nodes share an id"
    yield from _order_problems(graph, graph.nodes, made)
    for x in graph.outputs:
        if not isinstance(x, Const) and x not in made:
            yield f"result {graph.values[x]} is never made"


def _order_problems(graph: Graph, nodes: Sequence[Node], made: set[int]) -> Iterator[str]:
    for node in nodes:
        for x in node.inputs:
            if not isinstance(x, Const) and x not in made:
                yield f"{node.op} (node {node.id}) uses {graph.values[x]} before it is made"
        for body in node.bodies:
            inside = made | set(body.inputs)
            yield from _order_problems(graph, body.nodes, inside)
            for x in body.outputs:
                if not isinstance(x, Const) and x not in inside:
                    yield f"a body of {node.op} (node {node.id}) never makes its result {graph.values[x]}"
        for v in node.outputs:
            if v in made:
                yield f"{node.op} (node {node.id}) makes {graph.values[v]} a second time"
            made.add(v)


@contract("the candidates")
def check_candidates(c: Candidates) -> Iterator[str]:
    """Every op has a strategy, every signature fits its tensor."""
    n, seen = c.placement.ndim, set[tuple[int, tuple[int, ...]]]()
    for node in c.graph.walk():
        strategies = c.strategies.get(node.id, ())
        if node.bodies:
            continue
        if not strategies:
            yield f"{node.op} (node {node.id}) has no strategy"
        operands = [*(c.graph.operand(x) for x in node.inputs), *(c.graph.values[v] for v in node.outputs)]
        # Equal ops share their strategies: what fits tensors of as many dims has been looked at.
        key = id(strategies), tuple(len(x.shape) for x in operands)
        if key in seen:
            continue
        seen.add(key)
        dims = key[1]
        for s in strategies:
            for nd, ndim in zip((*s.operands, *s.results), dims, strict=True):
                if not _fits(nd, ndim, n):
                    yield f"{node.op} (node {node.id}): {nd} does not fit a tensor of {ndim} dims"


def _fits(nd: NdSbp, ndim: int, n: int) -> bool:
    for s in nd:
        if s.__class__ is Split and not 0 <= s.dim < ndim:
            return False
    return len(nd) == n


@contract("the assignment")
def check_assignment(c: Candidates, a: ChosenSignatures, boxings: Boxings) -> Iterator[str]:
    """Every choice is a candidate, and every value can be brought where it is wanted."""
    tables: dict[int, Boxing] = {}
    for node in c.graph.walk():
        if node.bodies:
            for nd, options in zip(a.ports[node.id], c.ports[node.id], strict=True):
                if nd not in options:
                    yield f"{node.op} (node {node.id}) was given a port that is not its own"
            continue
        strategy = a.strategies[node.id]
        if not any(s is strategy for s in c.strategies[node.id]):
            yield f"{node.op} (node {node.id}) was given a strategy that is not its own"
        for x, nd in zip(node.inputs, strategy.operands, strict=True):
            if isinstance(x, Const):
                continue
            if x not in tables:
                tables[x] = boxing_of(boxings, c, c.graph.values[x].shape, c.graph.values[x].dtype, x)
            if nd not in tables[x].index:
                yield f"{c.graph.values[x]} cannot be boxed to {nd}"


@contract("the physical program")
def check_physical(p: Physical) -> Iterator[str]:
    """Every step reads versions that exist; results exist at rest; no result is partial."""
    have = set(zip(p.graph.inputs, p.inputs, strict=True))
    yield from _step_problems(p, p.steps, have)
    for x, nd in zip(p.graph.outputs, p.outputs, strict=True):
        if not isinstance(x, Const) and (x, nd) not in have:
            yield f"result {p.graph.values[x]} is not there as {nd}"


def _step_problems(p: Physical, steps: Sequence[Step], have: set[Version]) -> Iterator[str]:
    for i, step in enumerate(steps):
        for version in reads(step):
            if version not in have:
                what = f"box {step.move.kind}" if isinstance(step, Box) else step.node.op
                value, nd = version
                yield f"step {i} ({what}) reads {p.graph.values[value]} as {nd}, which nobody made"
        if isinstance(step, Border):
            for body in step.bodies:
                entering = {
                    (v, nd)
                    for port, nd in zip(ports(step.node), step.inner_signatures, strict=True)
                    for v in port.enters
                }
                yield from _step_problems(p, body, have | entering)
        have.update(writes(step))


@contract("owners")
def check_owners(p: Physical) -> Iterator[str]:
    """Only a reduction of a sum brings bits of one device each."""
    for b, _ in p.boxes():
        if b.owned and (b.move.kind not in ("all_reduce", "reduce_scatter") or b.move.old != P):
            yield f"{b.move.kind} of value {b.value} from {b.move.old} is marked as owned"


@contract("the plan")
def check_plan(plan: PlanData) -> Iterator[str]:
    """Every collective is one of the placement, and every leaf has a signature and a name."""
    for what, sbps, paths in (
        ("arguments", plan.in_sbp, plan.in_paths),
        ("results", plan.out_sbp, plan.out_paths),
    ):
        if len(sbps) != len(paths):
            yield f"{len(sbps)} signatures of {len(paths)} {what}"
    if plan.gap < 0:
        yield f"its bound of {plan.bound} s is above its {plan.seconds} s"
    if plan.step_gap < 0:
        yield f"no step is shorter than {plan.step_bound} s, and its own takes {plan.step_seconds} s"
    for i, c in enumerate(plan.collectives):
        if c.kind != "send" and not set(c.axes) <= {*plan.part(i)[0].placement.axes}:
            yield f"{c.kind} of {c.tensor} over {c.axes}, which {plan.placement} does not have"
        if c.count < 0 or c.seconds < 0 or (c.count and c.wire_bytes <= 0):
            yield f"{c.kind} of {c.tensor}: {c.count} times, {c.wire_bytes} bytes, {c.seconds} seconds"
