"""What of a program goes through memory: which ops compilers merge into which kernels.

A search over signatures needs a cost of each op by itself. So it is settled beforehand, on the logical graph,
what each op reads from memory and writes to it, and a chain of element-wise ops costs what it moves once.
What collectives then stand between is not merged, and costs more than is counted here.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from sbp.passes.physical.fusion import PARTIAL, Fusing, KernelOp, ShardSizes, changes_in_place, op_of
from sbp.passes.physical.kernels import Buffer, Kernels, kernels
from sbp.passes.physical.layouts import copies
from sbp.passes.physical.order import saving_turns
from sbp.passes.physical.program import Border, Compute, Physical
from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.traffic import Lifetime, OperandCopy, OpTraffic
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.placement import placement
from sbp.signature import B

WHOLE = (B,)


@dataclass(frozen=True)
class KernelMerges:
    """What merging ops into kernels makes of a graph.

    Arguments:
      traffic: per node id, what it reads from memory and writes to it.
      lives: when values lie in memory.
      operand_copies: when copies of operands lie there that libraries want laid out otherwise.
      times: per node id, from when until when it runs. An op has two times: its operands are boxed in the
        first, and it computes in the second. Those of a loop's body are between.
    """

    traffic: dict[int, OpTraffic]
    lives: tuple[Lifetime, ...]
    operand_copies: tuple[OperandCopy, ...]
    times: dict[int, tuple[int, int]] = field(default_factory=dict)


def merge_ops(graph: Graph) -> KernelMerges:
    """Which values of a graph go through memory, and when."""
    found = _Found(Physical(graph, placement("cpu", shape=(1,)), (), (), ()))
    found.add(graph.nodes, graph.outputs, 0, frozenset(graph.inputs))
    return KernelMerges(found.traffic, tuple(found.lives), tuple(found.operand_copies), found.at)


@dataclass
class _Found:
    """Collects what is found, body by body; `at` has the times from and to which each op runs."""

    whole: Physical
    traffic: dict[int, OpTraffic] = field(default_factory=dict)
    lives: list[Lifetime] = field(default_factory=list)
    operand_copies: list[OperandCopy] = field(default_factory=list)
    at: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(
        self,
        nodes: Sequence[Node],
        kept: Iterable[Operand],
        time: int,
        arguments: frozenset[int] = frozenset(),
    ) -> int:
        """Adds the ops of a body that begins at a time, and of the bodies inside it; the time of its end."""
        ops = [_op(node, self.whole) for node in nodes]
        made = {v for op in ops for v in op.writes}
        held = dict.fromkeys(v for op in ops for v in op.reads if v not in made)
        at_end = dict.fromkeys((x, WHOLE) for x in kept if not isinstance(x, Const))
        k = kernels(ops, ShardSizes(self.whole), [v for v in at_end if v in made or v in held], held)
        self.add_traffic(nodes, k)
        # In the order in which they run where memory is short.
        turn = saving_turns(k, {t for t in k.tensors if t.maker < 0})
        for i in sorted(range(len(nodes)), key=turn.__getitem__):
            start, time = time, time + 1
            for body in nodes[i].bodies:
                time = self.add(body.nodes, [x for p in ports(nodes[i]) for x in p.leaves], time)
            time += 1
            self.at[nodes[i].id] = start, time
        self.add_copies(nodes, k)
        over = _written_over(k, turn)
        for tensor in k.tensors:
            if tensor.readers and (tensor.maker >= 0 or tensor.version[0] in arguments):
                times = [(time, time) if j == k.end else self.at[nodes[j].id] for j in tensor.readers]
                first, last = min(t for t, _ in times), max(t for _, t in times)
                lies = (
                    (0, time) if tensor.maker < 0 else (self.birth(nodes[tensor.maker], tensor in over), last)
                )
                is_result = bool(arguments) and tensor.maker >= 0 and k.end in tensor.readers
                self.lives.append(Lifetime(tensor.version[0], *lies, first, last, is_result))
        return time

    def add_copies(self, nodes: Sequence[Node], k: Kernels) -> None:
        """Adds what of the operands of a body's ops is copied."""
        for copy in copies(k, ShardSizes(self.whole)):
            users = sorted(copy.users, key=lambda i: self.at[nodes[i].id])
            first, last = nodes[users[0]], nodes[users[-1]]
            operand = next(j for j in range(2) if k.source(users[0], j) is copy.tensor)
            start, end = self.at[first.id][0] + 1, self.at[last.id][1]
            factor, value = copy.bytes / copy.tensor.bytes, first.inputs[operand]
            assert not isinstance(value, Const)
            self.operand_copies.append(OperandCopy(value, first.id, operand, factor, start, end))

    def birth(self, node: Node, over: bool) -> int:
        """When a result is there beside what the op reads; after the op if it takes an operand's space."""
        start, end = self.at[node.id]
        return end if over else start + (not node.bodies)

    def add_traffic(self, nodes: Sequence[Node], k: Kernels) -> None:
        """Adds what the ops of a body read and write."""
        inside = _together(k, kernels_that_compute(k), self.whole.graph)
        counted: set[tuple[int, int]] = set()
        for i, (node, op) in enumerate(zip(nodes, k.ops, strict=True)):
            if node.bodies:
                continue
            reads = [0] * len(node.inputs)
            for version, tensor in zip(op.reads, k.sources[i], strict=True):
                if tensor.written and op.kind is not Fusing.VIEW:
                    # A kernel that reads a tensor for several of its ops reads it once.
                    fresh = {(id(tensor), kernel) for kernel in inside[i]} - counted
                    counted |= fresh
                    reads[node.inputs.index(version[0])] += len(fresh)
            written = {t.version for t in k.writes[i]}
            writes = tuple((v, WHOLE) in written for v in node.outputs)
            if changes_in_place(node.op):
                # What is changed in place is neither read nor written as a whole, if it lies in memory.
                new = not k.sources[i] or not k.sources[i][0].written
                self.traffic[node.id] = OpTraffic((0, *reads[1:]), (new, *writes[1:]), in_place=True)
            else:
                self.traffic[node.id] = OpTraffic(tuple(reads), writes, node.op in PARTIAL)


def _written_over(k: Kernels, turn: Sequence[int]) -> set[Buffer]:
    """Results that take the space of an operand of their size which nobody else needs any more."""
    found, given = set[Buffer](), set[Buffer]()
    for t in k.tensors:
        for y in k.reads[t.maker] if t.maker >= 0 else ():
            ends = max(y.readers, key=turn.__getitem__) == t.maker and y.readers[t.maker]
            if ends and y.maker >= 0 and y.bytes == t.bytes and y not in given:
                found.add(t)
                given.add(y)
                break
    return found


def _op(node: Node, whole: Physical) -> KernelOp:
    """An op on one device."""
    if node.bodies:
        inside = tuple(WHOLE for _ in ports(node))
        bodies = tuple(tuple(_compute(inner) for inner in _flat(body.nodes)) for body in node.bodies)
        return op_of(Border(node, inside, bodies), whole)
    return op_of(_compute(node), whole)


def _flat(nodes: Iterable[Node]) -> Iterable[Node]:
    """Ops, those of inner bodies instead of their loops."""
    for node in nodes:
        if node.bodies:
            for body in node.bodies:
                yield from _flat(body.nodes)
        else:
            yield node


def _compute(node: Node) -> Compute:
    return Compute(node, _whole(len(node.inputs), len(node.outputs)))


@cache
def _whole(operands: int, results: int) -> Strategy:
    """All of so many operands and results."""
    return Strategy((WHOLE,) * operands, (WHOLE,) * results, (False,) * operands, ())


def kernels_that_compute(k: Kernels) -> list[set[int]]:
    """Per op, the kernels that compute it: itself, or those of all that read it."""
    inside: list[set[int]] = [set() for _ in k.ops]
    for i in reversed(range(len(k.ops))):
        if k.runs(i):
            inside[i] = {i}
        for tensor in k.sources[i]:
            if tensor.maker >= 0 and not tensor.written:
                inside[tensor.maker] |= inside[i]
    return inside


def _together(k: Kernels, inside: list[set[int]], graph: Graph) -> list[set[int]]:
    """The same with reductions as part of another kernel that reads the same tensor.

    One of rows (of the last dim) belongs to who reads these rows and what it gives: a softmax or a norm reads
    its operand once (softmax_rewriter_triton.cc in XLA). Those over the same dims are one kernel with several
    results (multi_output_fusion.cc): the sums of a batch norm and of its gradients.
    """
    becomes: dict[int, int] = {}
    alike: dict[tuple[int, tuple[int, ...]], int] = {}
    for i in reversed(range(len(k.ops))):
        axes = _reduced(k, i)
        if not axes or not k.writes[i]:
            continue
        rows = list(dict.fromkeys(id(t) for t in k.reads[i]))
        if axes == (len(graph.values[k.ops[i].reads[0][0]].shape) - 1,):
            users = sorted(j for t in k.writes[i] for j in t.readers if j < k.end)
            beside = [j for j in users if k.ops[j].kind is not Fusing.CALL and _reads(k, j, rows)]
            if beside:
                becomes[i] = becomes.get(beside[0], beside[0])
                continue
        other = next((alike[t, axes] for t in rows if (t, axes) in alike), None)
        if other is not None:
            becomes[i] = becomes.get(other, other)
        alike.update(dict.fromkeys(((t, axes) for t in rows), becomes.get(i, i)))
    return [{becomes.get(j, j) for j in each} for each in inside]


def _reads(k: Kernels, i: int, tensors: Collection[int]) -> bool:
    return any(id(t) in tensors for t in k.reads[i])


def _reduced(k: Kernels, i: int) -> tuple[int, ...]:
    """The dims that an op reduces; none for other ops."""
    step = k.ops[i].step
    if not isinstance(step, Compute) or not step.node.op.startswith("reduce_") or not k.ops[i].reads:
        return ()
    return tuple(step.node.params.get("axes", ()))
