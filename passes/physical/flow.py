"""Who makes a tensor, and who wants it how: what sentences on a program are made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp.passes.physical.program import Border, Box, Compute, Physical, reads, writes
from sbp.passes.plan.candidates import Strategy
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Node
from sbp.signature import NdSbp


@dataclass(frozen=True)
class Flow:
    """The ways of the tensors of one physical program, bodies of loops included."""

    physical: Physical

    @cached_property
    def computed(self) -> Mapping[int, tuple[Node, Strategy]]:
        """Every op with its strategy, by the op's id."""
        return {s.node.id: (s.node, s.strategy) for s, _ in self.physical.walk() if isinstance(s, Compute)}

    @cached_property
    def borders(self) -> Mapping[int, Node]:
        """Loops and branches, by their ids."""
        return {s.node.id: s.node for s, _ in self.physical.walk() if isinstance(s, Border)}

    @cached_property
    def makers(self) -> Mapping[int, tuple[Node, Strategy]]:
        """The op that makes each value; none for arguments and for what comes out of a loop."""
        return {v: made for made in self.computed.values() for v in made[0].outputs}

    @cached_property
    def made(self) -> Mapping[int, NdSbp]:
        """How each value lies where it is made."""
        p = self.physical
        out = dict(zip(p.graph.inputs, p.inputs, strict=True))
        for step, _ in p.walk():
            if not isinstance(step, Box):
                out.update(writes(step))
            if isinstance(step, Border):
                wired = zip(ports(step.node), step.inside, strict=True)
                out.update((v, nd) for port, nd in wired for v in port.enters)
        return out

    @cached_property
    def wanted(self) -> Mapping[int, Sequence[tuple[int, NdSbp]]]:
        """How each value is read: (node id, or -1 for what leaves the program or a body; signature)."""
        p = self.physical
        out: dict[int, list[tuple[int, NdSbp]]] = {}
        for step, _ in p.walk():
            if not isinstance(step, Box):
                for v, nd in reads(step):
                    out.setdefault(v, []).append((step.node.id, nd))
            if isinstance(step, Border):
                for port, nd in zip(ports(step.node), step.inside, strict=True):
                    for x in port.leaves:
                        if isinstance(x, int):
                            out.setdefault(x, []).append((-1, nd))
        for x, nd in zip(p.graph.outputs, p.outputs, strict=True):
            if not isinstance(x, Const):
                out.setdefault(x, []).append((-1, nd))
        return out

    @cached_property
    def across(self) -> Mapping[int, int]:
        """What a value is on the other side of a loop's or branch's border."""
        across: dict[int, int] = {}
        for node in self.borders.values():
            for port in ports(node):
                outside = None if port.operand is None else node.inputs[port.operand]
                if isinstance(outside, int):
                    across.update(dict.fromkeys(port.enters, outside))
                leaving = [x for x in port.leaves if isinstance(x, int)]
                if port.result is not None and leaving:
                    across[node.outputs[port.result]] = leaving[0]
        return across
