"""What a user calls a tensor, and which tensors that means: paths, lines, ops at a line, names of a plan."""

import difflib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp.compat.untyped import DType
from sbp.errors import ArgumentError, Problem
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.program import Flow, Physical
from sbp.passes.program.graph import Const, Graph
from sbp.passes.program.names import Names, common, without_indices
from sbp.signature import NdSbp, format_sbp

NEAREST = 5
"""Names in an error for one that is not known."""
MOST_KINDS = 12
"""Kinds of tensors in an error for a name that means several."""


@dataclass(frozen=True, slots=True)
class Target:
    """NamedTensors that a name means: of one kind, held together.

    Arguments:
      name: what they are called.
      shape, dtype: of each.
      arguments, results: their positions among the arguments and results of the program.
      values: those that ops make, by id.
      signatures: how the first of them lies: at rest; or as it is made, and then as it is wanted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    signatures: tuple[NdSbp, ...] = ()

    @property
    def text(self) -> str:
        """The name, with dtype and shape."""
        return f"{self.name}, {tensor_text(self.shape, self.dtype)}"

    @property
    def count(self) -> int:
        """How many tensors."""
        return len(self.arguments) + len(self.results) + len(self.values)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor that can be named.

    Arguments:
      kind: those of one kind may be held together.
      labels: what it may be called; `full` tells its kind from all others.
      at: ("argument" | "result" | "value", position or id).
      loosely: what it may be called if nothing is called so exactly.
      place: the position of its placement, in a program with stages.
    """

    kind: Hashable
    labels: tuple[str, ...]
    full: str
    at: tuple[str, int]
    shape: tuple[int, ...]
    dtype: DType
    signatures: tuple[NdSbp, ...]
    loosely: tuple[str, ...] = ()
    place: int = 0


def tensors_called(
    name: str, program: str, ends: Sequence[TensorEntry], made: Sequence[TensorEntry]
) -> list[TensorEntry]:
    """The tensors that a name means, all of one kind.

    Arguments:
      program: the function's name.
      ends: arguments and results, and what is sent between placements; these are looked at first.
      made: what ops make.

    Raises:
      ArgumentError: for a name that means none, with the nearest ones, or several kinds.
    """
    every = (*ends, *made)
    for found in (
        [e for e in ends if name in e.labels],
        [e for e in made if name in e.labels],
        [e for e in made if name in e.loosely],
    ):
        if found:
            if len({e.kind for e in found}) > 1:
                raise _several(name, program, found)
            return found
    known = dict.fromkeys(label for e in every for label in (*e.labels, *e.loosely))
    near = difflib.get_close_matches(name, known, NEAREST, 0.3) or [*known][:NEAREST]
    why = "no argument, result, op or line of the program is called so"
    fix = "a path such as params['w'], [*] for all of a list, a line, or 'dot_general at gpt.py:150'"
    raise _error(name, program, "nearest: " + "; ".join(near), why, fix)


def _several(name: str, program: str, found: Sequence[TensorEntry]) -> ArgumentError:
    kinds = list(dict.fromkeys(e.kind for e in found))
    firsts = [next(e for e in found if e.kind == kind) for kind in kinds]
    shown = [f"{e.full} ({' -> '.join(map(format_sbp, e.signatures))})" for e in firsts[:MOST_KINDS]]
    rest = [f"and {len(firsts) - MOST_KINDS} more"] if len(firsts) > MOST_KINDS else []
    why = f"it means {len(kinds)} tensors of different kinds, each with a signature of its own"
    return _error(name, program, "; ".join([*shown, *rest]), why, f"one of them: {firsts[0].full!r}")


def _error(name: str, program: str, legal: str, why: str, fix: str) -> ArgumentError:
    return ArgumentError(Problem("argument", f"a tensor of {program}", repr(name), legal, why, fix))


def target_of(found: Sequence[TensorEntry]) -> Target:
    """Tensors of one kind, held together."""
    first = found[0]
    at: dict[str, list[int]] = {"argument": [], "result": [], "value": []}
    for e in found:
        at[e.at[0]].append(e.at[1])
    return Target(
        common(e.labels[0] for e in found),
        first.shape,
        first.dtype,
        tuple(at["argument"]),
        tuple(at["result"]),
        tuple(at["value"]),
        first.signatures,
    )


@dataclass(frozen=True)
class NamedTensors:
    """All tensors of a plan that still has its program.

    Arguments:
      ties: per result, the argument that it comes back as, or None.
    """

    plan: PlanData
    physical: Physical
    ties: Sequence[int | None]

    @property
    def graph(self) -> Graph:
        """The logical graph."""
        return self.physical.graph

    def find(self, name: str) -> Target:
        """The tensors that a name means.

        Raises:
          ArgumentError: for a name that means none, with the nearest ones, or several kinds.
        """
        return target_of(tensors_called(name, self.plan.name, self.ends, self.op_results))

    @cached_property
    def ends(self) -> tuple[TensorEntry, ...]:
        """Arguments and results; a result that comes back as an argument is that argument."""
        p, plan = self.physical, self.plan
        out: list[TensorEntry] = []
        back: dict[int, list[str]] = {}
        for path, tie in zip(plan.out_paths, self.ties, strict=False):
            if tie is not None:
                back.setdefault(tie, []).append(path)
        for i, path in enumerate(plan.in_paths):
            value = self.graph.values[p.graph.inputs[i]]
            labels = _with_patterns([path, *back.get(i, ())])
            kind = "argument", without_indices(path), value.shape, str(value.dtype)
            full = f"{path}, {tensor_text(value.shape, value.dtype)}"
            out.append(
                TensorEntry(kind, labels, full, ("argument", i), value.shape, value.dtype, (p.inputs[i],))
            )
        for j, (path, x) in enumerate(zip(plan.out_paths, p.graph.outputs, strict=False)):
            if not isinstance(x, Const) and (j >= len(self.ties) or self.ties[j] is None):
                value = self.graph.values[x]
                kind = "result", without_indices(path), value.shape, str(value.dtype)
                full, at = f"{path}, {tensor_text(value.shape, value.dtype)}", ("result", j)
                labels = _with_patterns([path])
                out.append(TensorEntry(kind, labels, full, at, value.shape, value.dtype, (p.outputs[j],)))
        return tuple(out)

    @cached_property
    def op_results(self) -> tuple[TensorEntry, ...]:
        """What ops make, bodies of loops included."""
        return tuple(self._made())

    def _made(self) -> Iterator[TensorEntry]:
        flow = Flow(self.physical)
        names = Names(self.graph, self.plan.in_paths, self.plan.out_paths)
        for node in self.graph.walk():
            for v in node.outputs:
                if v not in flow.result_sbp:
                    continue
                value, name, line = self.graph.values[v], names.of(v), str(node.source)
                tensor = tensor_text(value.shape, value.dtype)
                full = f"{without_indices(name)} at {line}, {tensor}"
                labels = (*_with_patterns([f"{name} at {line}", name]), f"{name} at {line}, {tensor}", full)
                lying = (flow.result_sbp[v], *(nd for _, nd in flow.readers.get(v, ())))
                signatures = tuple(dict.fromkeys(lying))
                kind, loosely = (value.shape, value.dtype, signatures), (f"{node.op} at {line}", line)
                yield TensorEntry(full, labels, full, ("value", v), *kind, loosely)


def _with_patterns(labels: Sequence[str]) -> tuple[str, ...]:
    """Names, and those that they share with the same of other layers."""
    return tuple(dict.fromkeys([*labels, *map(without_indices, labels)]))


def tensor_text(shape: Sequence[int], dtype: DType) -> str:
    """A dtype with a shape.

    >>> import numpy as np
    >>> tensor_text((4, 8), np.dtype("float32"))
    'float32[4, 8]'
    """
    return f"{dtype}[{', '.join(map(str, shape))}]"
