"""Tensors of scalars alone, such as masks, that a loop makes again: XLA takes them out, and merges equals.

So a mask that is in memory before a loop stays there until the last loop is done whose body makes the same
one; recomputed layers (`jax.checkpoint` in a scan) do. One scalar that is repeated is no such tensor: XLA
takes it into the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sbp.passes.physical.kernels import Kernels
from sbp.passes.physical.program import Border, Compute, Step, Version
from sbp.passes.program.graph import Const
from sbp.signature import NdSbp


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor by how it is made: equal ones are one tensor."""

    op: str
    params: tuple[tuple[str, str], ...]
    operands: tuple[_Made | str, ...]
    result: int
    nd: NdSbp


def read_in_loops(k: Kernels) -> None:
    """Lets loops read what is in memory and what their bodies make as well."""
    steps = [op.step for op in k.ops if op.step is not None]
    loops = [(i, op.step) for i, op in enumerate(k.ops) if isinstance(op.step, Border)]
    if not loops:
        return
    there = {t.version: t for t in k.tensors if t.maker >= 0 and t.written}
    known = {what: there[v] for v, what in _of_scalars(steps) if v in there and not _is_repeated(what)}
    for i, loop in loops if known else ():
        for _, what in (found for body in loop.bodies for found in _of_scalars(body)):
            if what in known and known[what].maker < i:
                known[what].readers.setdefault(i, False)


def _is_repeated(what: _Made) -> bool:
    return what.op == "broadcast_in_dim" and not any(isinstance(x, _Made) for x in what.operands)


def _of_scalars(steps: Iterable[Step]) -> Iterator[tuple[Version, _Made]]:
    """What some steps make of scalars alone, and how."""
    found: dict[Version, _Made] = {}
    for step in steps:
        if not isinstance(step, Compute) or step.node.bodies:
            continue
        node, strategy = step.node, step.strategy
        operands = list[_Made | str]()
        for x, nd in zip(node.inputs, strategy.operands, strict=True):
            if not isinstance(x, Const) and (x, nd) not in found:
                break
            operands.append(f"{x.dtype} {x}" if isinstance(x, Const) else found[x, nd])
        else:
            params = tuple((name, repr(value)) for name, value in sorted(node.params.items()))
            for j, version in enumerate(zip(node.outputs, strategy.results, strict=True)):
                found[version] = _Made(node.op, params, tuple(operands), j, version[1])
                yield version, found[version]
