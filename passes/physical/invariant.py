"""Tensors of scalars alone, such as masks, that a loop makes again: XLA takes them out, and merges equals.

So a mask that is in memory before a loop stays there until the last loop is done whose body makes the same
one; recomputed layers (`jax.checkpoint` in a scan) do. One scalar that is repeated is no such tensor: XLA
takes it into the loop.
"""

from collections.abc import Hashable, Iterable, Iterator

from sbp.passes.physical.kernels import Kernels
from sbp.passes.physical.program import Border, Compute, Step, Version
from sbp.passes.program.graph import Const


def read_in_loops(k: Kernels) -> None:
    """Lets loops read what is in memory and what their bodies make as well."""
    steps = [op.step for op in k.ops if op.step is not None]
    loops = [(i, op.step) for i, op in enumerate(k.ops) if isinstance(op.step, Border)]
    if not loops:
        return
    there, numbers = {t.version: t for t in k.tensors if t.maker >= 0 and t.written}, _Numbers()
    known = {n: there[v] for v, n in _of_scalars(steps, numbers) if v in there and n not in numbers.repeated}
    for i, loop in loops if known else ():
        for _, n in (found for body in loop.bodies for found in _of_scalars(body, numbers)):
            if n in known and known[n].maker < i:
                known[n].readers.setdefault(i, False)


class _Numbers:
    """Numbers of tensors by how they are made: equal ones are one tensor.

    What a tensor is made of stands in its key by number: a key of keys would be as long as all paths to it.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}
        self.repeated: set[int] = set()

    def of(self, step: Compute, operands: tuple[int | str, ...], result: int) -> int:
        node, nd = step.node, step.strategy.results[result]
        params = tuple((name, repr(value)) for name, value in sorted(node.params.items()))
        n = self.known.setdefault((node.op, params, operands, result, nd), len(self.known))
        if node.op == "broadcast_in_dim" and not any(isinstance(x, int) for x in operands):
            self.repeated.add(n)
        return n


def _of_scalars(steps: Iterable[Step], numbers: _Numbers) -> Iterator[tuple[Version, int]]:
    """What some steps make of scalars alone, with its number."""
    found: dict[Version, int] = {}
    for step in steps:
        if not isinstance(step, Compute) or step.node.bodies:
            continue
        read = list(zip(step.node.inputs, step.strategy.operands, strict=True))
        if not all(isinstance(x, Const) or (x, nd) in found for x, nd in read):
            continue
        operands = tuple(f"{x.dtype} {x}" if isinstance(x, Const) else found[x, nd] for x, nd in read)
        for j, version in enumerate(zip(step.node.outputs, step.strategy.results, strict=True)):
            found[version] = numbers.of(step, operands, j)
            yield version, found[version]
