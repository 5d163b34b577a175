"""An op as its rule sees it along one axis, and as its body sees it on one device."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from sbp.communication.protocol import Communication, Context
from sbp.errors import Problem, RuleError, raise_all
from sbp.layout import Layout
from sbp.passes.program.graph import Graph, Node
from sbp.rules.entry import Op, Row
from sbp.rules.registry import valid_rows
from sbp.signature import NdSbp

Lying: TypeAlias = tuple[Sequence[NdSbp], Sequence[NdSbp]]
"""How the operands and the results of an op lie."""
Said: TypeAlias = tuple[str, tuple[int, ...]]
"""A collective that a body runs: its kind, and the axes that take part."""


def op_of(graph: Graph, node: Node, shapes: Sequence[Any], results: Sequence[Any], group: int) -> Op:
    """The rule's view of a node, given what the outer axes left of its shapes."""
    return Op(
        node.op,
        tuple(shapes),
        tuple(results),
        tuple(graph.operand(x).dtype for x in node.inputs),
        tuple(graph.values[v].dtype for v in node.outputs),
        node.params,
        group,
        tuple(graph.operand(x).shape for x in node.inputs),
    )


def rows_of(node: Node, op: Op) -> tuple[Row, ...]:
    """Every valid 1-D signature of a node, seen as `op`.

    Raises:
      RuleError: with the user's line, if the rule does not describe its op.
    """
    try:
        return valid_rows(node.rule, op)
    except RuleError as e:
        raise RuleError(*(at_line(p, node) for p in e.problems)) from e


def at_line(problem: Problem, node: Node) -> Problem:
    """The same problem with the application that has it: the op, and its line where one is known."""
    of = "" if repr(node.op) in problem.where else f" of {node.op!r}"
    return replace(problem, where=problem.where + of + (f" at {node.source}" if node.source.file else ""))


def context_of(
    graph: Graph,
    node: Node,
    lying: Lying,
    hierarchy: tuple[int, ...],
    coords: Sequence[Any] = (),
    names: Sequence[str] = (),
    reports: list[Any] | None = None,
    said: list[Said] | None = None,
) -> Context:
    """What the body of an op knows about its shards.

    Arguments:
      lying: how its operands and its results lie.
      coords, names, reports, said: as of `Context`; without them the body can be asked what it sends, and
        not be run.
    """
    values = [graph.operand(x) for x in node.inputs]
    ins = [Layout(x.shape, nd, hierarchy) for x, nd in zip(values, lying[0], strict=True)]
    outs = [
        Layout(graph.values[v].shape, nd, hierarchy) for v, nd in zip(node.outputs, lying[1], strict=True)
    ]
    dtypes = [x.dtype for x in values]
    return Context(node.primitive, node.params, tuple(ins), tuple(outs), coords, names, dtypes, reports, said)


def communication_of(
    graph: Graph, node: Node, lying: Lying, hierarchy: tuple[int, ...]
) -> tuple[Communication, ...]:
    """The collectives inside an op's body, without those that send nothing or are for what nobody uses.

    Raises:
      RuleError: with the user's line, if the rule declares what is no collective of this op.
    """
    if node.rule is None or node.rule.communication is None:
        return ()
    ctx = context_of(graph, node, lying, hierarchy)
    communication = (t for t in declared_communication(node, ctx) if t.wire_bytes > 0)
    return tuple(t for t in communication if t.result is None or graph.uses(node.outputs[t.result]))


def held_bytes(graph: Graph, node: Node, lying: Lying, hierarchy: tuple[int, ...]) -> float:
    """What a device holds inside the body of an op, beside its operands and results."""
    if node.rule is None or node.rule.body_bytes is None:
        return 0.0
    return node.rule.body_bytes(context_of(graph, node, lying, hierarchy))


def declared_communication(node: Node, ctx: Context) -> list[Communication]:
    """What the rule of a node says that its body sends; nothing, if it has no word on it."""
    if node.rule is None or node.rule.communication is None:
        return []
    try:
        given = node.rule.communication(ctx)
        communication = list(given if isinstance(given, Iterable) else [given])
        raise_all(_communication_problems(node, communication, ctx))
    except RuleError as e:
        raise RuleError(*(at_line(p, node) for p in e.problems)) from e
    return communication


def _communication_problems(node: Node, communication: Sequence[object], ctx: Context) -> Iterator[Problem]:
    where, n = f"the communication of {node.op!r}", len(node.inputs)
    axes = len((*ctx.operands, *ctx.results)[0].hierarchy)
    for t in communication:
        if not isinstance(t, Communication):
            why, fix = "the plan lists each, with its bytes", "return [talk], or yield it; [] for none"
            yield Problem("rule", where, repr(t), "a list of sbp.rules.Communication", why, fix)
        elif not 0 <= t.operand < n:
            why, fix = f"the op has {n}", "the position of the operand that is sent"
            yield Problem("rule", where, f"operand={t.operand}", f"an operand, 0..{n - 1}", why, fix)
        elif not t.axes or not all(0 <= a < axes for a in t.axes):
            why, fix = f"the placement has {axes}", "such as layout.axes(dim)"
            yield Problem("rule", where, f"axes={t.axes}", f"axes of the placement, 0..{axes - 1}", why, fix)
