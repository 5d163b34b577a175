"""State: which result is the next value of which argument, so that it keeps the signature of that.

A result whose tree, shapes and dtypes are those of an argument is tied to it. Where several are alike, the
graph decides: the next value of a tensor is few ops away from it (`p - rate * g` is one op from `p`), while
what merely depends on it is many ops away, or of another shape on the way. Results that are as near to one
argument as to another go by their names, then by their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from numpy.typing import NDArray

from sbp.compat.untyped import DType, PyTree, TreeDef
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Graph, Node
from sbp.passes.program.trace import TracedProgram
from sbp.signature import NdSbp

FAR = 1_000
"""What an op counts whose result has another shape than its operand: what comes after it is no update."""
CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated"})
"""Ops that count as much, although the shapes may happen to be equal."""
UNRELATED = 1_000_000
"""Ops between a result and an argument that it does not depend on."""


TreeKind: TypeAlias = tuple[TreeDef, tuple[tuple[tuple[int, ...], DType], ...]]
"""A tree, with shapes and dtypes of its leaves."""


Carried: TypeAlias = set[tuple[int | None, int | None]]
"""The operands and results of a loop that are one carried value."""


@dataclass(frozen=True, slots=True)
class Tree:
    """An argument or a result.

    Arguments:
      path: a readable name; `name`: of the parameter, or the key in the results, if there is one.
      kind: its tree, shapes and dtypes.
      leaves: positions of its leaves among those of all arguments or results.
    """

    path: str
    name: str
    kind: TreeKind
    leaves: range

    @staticmethod
    def of(path: str, name: str, tree: PyTree, start: int) -> Tree:
        """The tree whose first leaf is at `start`."""
        leaves, treedef = jax.tree.flatten(tree)
        kind = treedef, tuple((tuple(x.shape), x.dtype) for x in leaves)
        return Tree(path, name, kind, range(start, start + len(leaves)))


@dataclass(frozen=True)
class Ties:
    """Per result leaf the argument leaf that it comes back as, or None; and remarks for the plan."""

    arguments: tuple[int | None, ...]
    notes: tuple[str, ...] = ()


def ties(
    traced: TracedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: PyTree,
    in_sbp: Sequence[NdSbp | None],
    out_sbp: Sequence[NdSbp | None],
) -> Ties:
    """Ties results to arguments; each argument is taken once, and leaves with a given signature are not tied.

    Arguments:
      args, kwargs, out: the trees, of shapes.
      in_sbp, out_sbp: per leaf, what is given.
    """
    given = list(arguments_of(traced.in_paths, args, kwargs))
    open_ = [
        r
        for r in results_of(out, {a.kind for a in given}, {a.name for a in given})
        if not r.leaves or None in [out_sbp[i] for i in r.leaves]
    ]
    tied: list[int | None] = [None] * len(out_sbp)
    notes: list[str] = []
    for kind in dict.fromkeys(r.kind for r in open_):
        alike_args, alike = [a for a in given if a.kind == kind], [r for r in open_ if r.kind == kind]
        for r, a in _matched(traced.graph, alike, alike_args, in_sbp, notes):
            for i, j in zip(r.leaves, a.leaves, strict=True):
                tied[i] = j if out_sbp[i] is None else None
    return Ties(tuple(tied), tuple(notes))


def arguments_of(paths: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tree]:
    """The arguments, positional ones first."""
    start = 0
    for key, tree in [*((None, a) for a in args), *((k, kwargs[k]) for k in sorted(kwargs))]:
        n = len(jax.tree.leaves(tree))
        whole = paths[start].removesuffix(_below(tree)) if n else ""
        yield Tree.of(key or whole, key or whole, tree, start)
        start += n


def _below(tree: PyTree) -> str:
    """The path of the first leaf inside a tree."""
    return keystr(tree_flatten_with_path(tree)[0][0][0])


def results_of(out: PyTree, kinds: set[TreeKind], names: set[str]) -> Iterator[Tree]:
    """The results that may be state: those in the outermost tuple, and in containers in it that are none.

    Of arrays in a dict or a named tuple only those count that have the name of an argument: the others are
    metrics.
    """

    def visit(path: str, name: str, tree: PyTree, start: int) -> Iterator[Tree]:
        found = Tree.of(f"result{path}", name, tree, start)
        inner = tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
        if found.kind in kinds or not inner or not inner[0][0]:
            yield found
            return
        for (key,), child in inner:
            label = getattr(key, "key", getattr(key, "name", ""))
            part = list(visit(path + keystr((key,)), str(label), child, start))
            start += len(jax.tree.leaves(child))
            is_array = len(part) == 1 and jax.tree_util.all_leaves([child])
            if not (label and is_array) or label in names:
                yield from part

    return visit("", "", out, 0)


def _matched(
    graph: Graph,
    results: Sequence[Tree],
    args: Sequence[Tree],
    in_sbp: Sequence[NdSbp | None],
    notes: list[str],
) -> Iterator[tuple[Tree, Tree]]:
    """The pairs of results and arguments of one kind that are nearest to each other, over all."""
    if len(results) == len(args) == 1 or not args or not results[0].leaves:
        yield from zip(results, args, strict=False)
        return
    from scipy.optimize import linear_sum_assignment  # scipy takes long to load

    near = distances(graph, results, args)
    other = np.array([[not r.name or r.name != a.name for a in args] for r in results])
    order = np.abs(np.arange(len(results))[:, None] - np.arange(len(args))[None, :])
    # Each of the three weighs more than all that come after it together.
    by_name = 1 + int(order.sum())
    by_distance = 1 + by_name * order.size
    rows, columns = linear_sum_assignment(near * by_distance + other * by_name + order)
    taken = list(zip(rows.tolist(), columns.tolist(), strict=True))
    notes.extend(_doubts(results, args, near, other, taken, in_sbp))
    yield from ((results[i], args[j]) for i, j in taken)


def _doubts(
    results: Sequence[Tree],
    args: Sequence[Tree],
    near: NDArray[np.int64],
    other: NDArray[np.bool_],
    taken: Sequence[tuple[int, int]],
    in_sbp: Sequence[NdSbp | None],
) -> Iterator[str]:
    """A remark where another argument is as near, and its signature was given to be another one."""

    def signed(a: int) -> list[NdSbp | None]:
        return [in_sbp[x] for x in args[a].leaves]

    of = {j: i for i, j in taken}
    for i, j in taken:
        for m in range(len(args)):
            k = of.get(m)
            if m == j or signed(j) == signed(m) or (k is not None and k < i):
                continue
            if near[i, j] >= FAR or not other[i, j]:
                continue
            exchanged = near[i, m] - near[i, j] + (0 if k is None else near[k, j] - near[k, m])
            if not exchanged and (k is None or other[k, m]):
                yield (
                    f"{results[i].path} keeps the signature of {args[j].path}, not that of {args[m].path}, "
                    "by their order, since nothing else tells them apart; out_sbp fixes it"
                )


def distances(graph: Graph, results: Sequence[Tree], args: Sequence[Tree]) -> NDArray[np.int64]:
    """Ops from each argument to each result, over their leaves, "results args".

    An argument that is returned as it is has 0; scalars all have, since they all lie alike.
    """
    out = np.zeros((len(results), len(args)), np.int64)
    if not any(shape for shape, _ in results[0].kind[1]):
        return out
    for j, a in enumerate(args):
        ops = _ops_from(graph, [graph.inputs[x] for x in a.leaves])
        for i, r in enumerate(results):
            for x, y in zip(r.leaves, a.leaves, strict=True):
                v = graph.outputs[x]
                if v != graph.inputs[y]:
                    # Another leaf of the argument that is returned here is not this one's next value.
                    out[i, j] += UNRELATED if isinstance(v, Const) else max(1, ops.get(v, UNRELATED))
    return out


def _ops_from(graph: Graph, sources: Sequence[int]) -> dict[int, int]:
    """Per value that depends on any source, the least number of ops to it."""
    found = dict.fromkeys(sources, 0)
    for node in graph.nodes:
        carried = {(p.operand, p.result) for p in ports(node)} if node.bodies else set()
        for k, v in enumerate(node.outputs):
            counts = [found[x] + _step(graph, node, i, k, carried) for i, x in _read(node, found)]
            if counts:
                found[v] = min(*counts, UNRELATED - 1)
    return found


def _read(node: Node, found: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    return ((i, x) for i, x in enumerate(node.inputs) if not isinstance(x, Const) and x in found)


def _step(graph: Graph, node: Node, operand: int, result: int, carried: Carried) -> int:
    """What an op counts from an operand to a result; a loop is one update of what it carries."""
    if node.bodies:
        return 1 if (operand, result) in carried else FAR
    there = graph.operand(node.inputs[operand])
    if node.op in CONTRACTIONS:
        return FAR
    return 1 if there.shape == graph.values[node.outputs[result]].shape else FAR
