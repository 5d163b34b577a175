"""In which type tensors are sent: in the narrowest that holds all of what is sent, or all that is read of it.

A tensor that was widened goes as what it was, and one that is only read to be narrowed goes as what it
becomes. XLA:GPU exchanges such conversions with collectives that copy (collective_quantizer.cc); written
down here, plans say what is sent, and programs send it on every platform.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sbp.compat.untyped import DType
from sbp.passes.boxing.moves import copies
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version, reads, writes
from sbp.passes.program.graph import Const, Graph
from sbp.passes.program.narrow_values import REARRANGING, holds
from sbp.signature import NdSbp, Partial


def send_narrow(physical: Physical, narrower: Mapping[int, DType]) -> Physical:
    """The same program, its moves told in which type they send.

    Arguments:
      narrower: per value that was widened, the type that holds all of it.
    """
    readers = _Readers(physical.graph)
    readers.add(physical.steps)
    readers.at_end.update(zip((x for x in physical.graph.outputs), physical.outputs, strict=True))
    steps = _told(physical.steps, narrower, readers, set())
    return replace(physical, steps=steps)


def _told(
    steps: Sequence[Step], narrower: Mapping[int, DType], readers: _Readers, exact: set[Version]
) -> tuple[Step, ...]:
    """The steps of one body; `exact` has the versions that nothing was computed of since they were widened,
    and is added to."""
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Border):
            bodies = (_told(body, narrower, readers, set(exact)) for body in step.bodies)
            step = replace(step, bodies=tuple(bodies))
        elif isinstance(step, Compute):
            if any(v in narrower for v in step.node.outputs):
                exact.update(v for v in writes(step) if v[0] in narrower)
        else:
            before, after = (step.value, step.move.before), (step.value, step.move.after)
            if before in exact and not isinstance(step.move.old, Partial):
                exact.add(after)
            else:
                exact.discard(after)
            if copies(step.move):
                narrow = narrower[step.value] if before in exact else readers.need(after)
                step = step if narrow is None else replace(step, sent_as=narrow)
        out.append(step)
    return tuple(out)


@dataclass
class _Readers:
    """Who reads which version; `at_end` has those that leave.

    Arguments:
      of: per value, each reader of it under some signature.
    """

    graph: Graph
    of: dict[int, list[tuple[NdSbp, Step]]] = field(default_factory=lambda: defaultdict(list))
    at_end: set[tuple[object, object]] = field(default_factory=set)
    known: dict[Version, DType | None] = field(default_factory=dict)

    def add(self, steps: Sequence[Step]) -> None:
        for step in steps:
            for v, nd in reads(step):
                self.of[v].append((nd, step))
            if isinstance(step, Border):
                for body in step.bodies:
                    self.add(body)

    def need(self, version: Version) -> DType | None:
        """The narrower type to which all who read a version narrow it first."""
        if version not in self.known:
            self.known[version] = None  # while it is looked for: of a loop of moves nobody narrows
            readers = (step for nd, step in self.of.get(version[0], ()) if nd == version[1])
            found = {self._needed(step, version) for step in readers}
            if len(found) == 1 and version not in self.at_end:
                self.known[version] = found.pop()
        return self.known[version]

    def _needed(self, step: Step, version: Version) -> DType | None:
        if isinstance(step, Box):
            return None if isinstance(step.move.old, Partial) else self.need((step.value, step.move.after))
        if isinstance(step, Border) or step.node.barrier >= 0 or _operands(step) != [version]:
            return None
        if step.node.op == "convert_element_type":
            wide, narrow = (self.graph.values[v].dtype for v in (version[0], step.node.outputs[0]))
            return narrow if holds(narrow, wide) else None
        return self.need(writes(step)[0]) if step.node.op in REARRANGING and len(writes(step)) == 1 else None


def _operands(step: Compute) -> list[Version]:
    pairs = zip(step.node.inputs, step.strategy.operands, strict=True)
    return [(x, nd) for x, nd in pairs if not isinstance(x, Const)]
