"""A body as XLA's scheduler sees it: kernels, collectives that are sent as one, and what packs these.

All-reduces that are sent as one are packed into one tensor, reduced there, and unpacked, each by a kernel of
its own; other collectives take several tensors at once. Kernels that go through the same tensor become one
with several results.

XLA:GPU sends as one collectives of one kind and group that do not wait for each other, in the order of the
program, up to a number of bytes (its combiners of all-reduces, all-gathers and reduce-scatters).
"""

import heapq
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from sbp.passes.physical.fusion import PRODUCTS, Fusing, Seconds
from sbp.passes.physical.kernels import Buffer, Kernels
from sbp.passes.physical.latency_hiding import HidingOp
from sbp.passes.physical.program import Border, Box

MATRIX_DIMS = 2


@dataclass(frozen=True, slots=True)
class ScheduleNode:
    """What runs as one.

    Arguments:
      reads, makes: positions of the ops whose operands it reads, and whose results it makes.
      position: in the order that takes little memory.
      after: other nodes that it waits for.
      sends: whether it is a collective.
      holds_wires: whether it is a loop that sends something.
      pool: the position of a gradient of max pooling for which it finds the maxima; -1 for all else.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    position: float
    seconds: float = 0.0
    after: tuple[int, ...] = ()
    sends: bool = False
    holds_wires: bool = False
    pool: int = -1


def schedule_nodes(
    k: Kernels,
    together: Sequence[tuple[int, ...]],
    when: Sequence[float],
    seconds: Seconds | None,
    numbers: Mapping[int, int] | None = None,
) -> list[ScheduleNode]:
    """The nodes of a body.

    Arguments:
      together: collectives that are sent as one.
      when: per op, its place in the order that takes little memory.
      seconds: of an op, or of collectives that are sent as one.
      numbers: where the program runs in sections, of which one each op is: nothing goes with ops
        of another.
    """

    def taken(*members: int) -> float:
        if seconds is None:
            return 0.0
        ops = [k.ops[i] for i in members]
        one = all(isinstance(op.step, Box) and op.sends for op in ops)
        return seconds(*ops) if one else sum(seconds(op) for op in ops)

    nodes = list[ScheduleNode]()
    for i, pooled in pool_gradients(k):
        # It is found as soon as it can be, unless it hides a collective.
        at = when[pooled.maker] + 0.1 if pooled.maker >= 0 else -1.0
        nodes.append(ScheduleNode((), (), at, taken(i), pool=i))
    for members in _units(k, together, numbers):
        op, at = k.ops[members[0]], max(when[i] for i in members)
        if is_packed(k, members):
            pack, send = len(nodes), len(nodes) + 1
            nodes += [
                ScheduleNode(members, (), at),
                ScheduleNode((), (), at, taken(*members), (pack,), sends=True),
                *(ScheduleNode((), (i,), at, after=(send,)) for i in members),
            ]
        else:
            sends = op.sends and not isinstance(op.step, Border)
            holds = op.sends and not sends
            nodes.append(ScheduleNode(members, members, at, taken(*members), sends=sends, holds_wires=holds))
    return nodes


def _units(
    k: Kernels, together: Sequence[tuple[int, ...]], numbers: Mapping[int, int] | None
) -> Sequence[tuple[int, ...]]:
    """The kernels that run as one, and all others by themselves, each after those that it waits for."""
    sent = tuple(together)
    sets = [*together, *k.memo(("siblings", sent), lambda: _siblings(k, {i for some in sent for i in some}))]

    def ordered() -> list[tuple[int, ...]]:
        running = (tuple(i for i in members if k.runs(i)) for members in units_in_order(k.makers, sets))
        return [members for members in running if members]

    if numbers is None:
        return k.memo(("units", sent), ordered)
    by_section = (sorted(members, key=lambda i: (numbers.get(i, 0), i)) for members in sets)
    sets = [tuple(some) for each in by_section for _, some in groupby(each, lambda i: numbers.get(i, 0))]
    return ordered()


def hiding_ops(
    k: Kernels, nodes: Sequence[ScheduleNode], later: Collection[int], in_loop: bool = False
) -> list[HidingOp]:
    """The same for the scheduler, and then what is read under other shapes; `later` are ids of ops that need
    nothing of this trip of a loop."""
    key = "waiting", in_loop, frozenset(later), tuple((n.reads, n.makes) for n in nodes)
    found = k.memo(key, lambda: _waiting(k, nodes, later, in_loop))
    times = [(n.seconds, n.sends, n.holds_wires, n.position) for n in nodes]
    # What is read under another shape is there with what makes it.
    times += [(0.0, False, False, nodes[makers[0]].position) for makers, _ in found[len(nodes) :]]
    return [HidingOp(makers, *own, arguments) for (makers, arguments), own in zip(found, times, strict=True)]


def _waiting(
    k: Kernels, nodes: Sequence[ScheduleNode], later: Collection[int], in_loop: bool
) -> list[tuple[tuple[int, ...], int]]:
    """What each op of the scheduler waits for, and how many arguments nobody else reads."""
    maker = {i: j for j, node in enumerate(nodes) for i in node.makes}
    finds = {node.pool: j for j, node in enumerate(nodes) if node.pool >= 0}
    pooled = dict(pool_gradients(k))
    found = list[tuple[tuple[int, ...], int]]()
    flat = [
        {t for i in node.reads if not in_loop and id(k.ops[i]) not in later for t in _flattened(k, i)}
        for node in nodes
    ]
    views = {t: len(nodes) + n for n, t in enumerate(dict.fromkeys(_in_order(k, nodes, flat)))}
    for node, flattened in zip(nodes, flat, strict=True):
        read = [
            *(t for i in node.reads if id(k.ops[i]) not in later for t in k.reads[i]),
            *([pooled[node.pool]] if node.pool >= 0 else []),
        ]
        before = [*node.after, *(finds[i] for i in node.reads if i in finds)]
        behind = (maker[m] for i in node.reads for m in sorted(k.waits[i]) if m in maker)
        made = (views[t] if t in flattened else maker[t.maker] for t in read if t.maker >= 0)
        makers = tuple(dict.fromkeys((*before, *made, *behind)))
        found.append((makers, sum(t.maker < 0 and len(t.readers) == 1 for t in read)))
    return [*found, *(((maker[t.maker],), 0) for t in views)]


def _flattened(k: Kernels, i: int) -> list[Buffer]:
    """What a product of matrices reads under another shape, which to XLA is an op of its own: of its operands
    all batch dims are one, and all that stay; what another product makes is so already."""
    # In trips of loops, those that are taken out too, XLA's memory shows none.
    if k.ops[i].name not in PRODUCTS or k.ops[i].peeled:
        return []
    made = (t for t in k.reads[i] if t.maker >= 0 and t.dims > MATRIX_DIMS)
    return [t for t in made if k.ops[t.maker].kind is not Fusing.CALL]


def _in_order(
    k: Kernels, nodes: Sequence[ScheduleNode], chosen: Sequence[Collection[Buffer]]
) -> Iterator[Buffer]:
    """Chosen tensors of nodes, as these read them."""
    for node, some in zip(nodes, chosen, strict=True):
        yield from (t for i in node.reads for t in k.reads[i] if t in some)


def numbers_of(nodes: Sequence[ScheduleNode], numbers: Mapping[int, int]) -> list[int]:
    """Per node, of which section of the program it is."""
    found = list[int]()
    for node in nodes:
        ops = [*node.reads, *node.makes, *([node.pool] if node.pool >= 0 else [])]
        found.append(max([*(numbers.get(i, 0) for i in ops), *(found[j] for j in node.after)], default=0))
    return found


def in_sections(ops: Sequence[HidingOp], numbers: Sequence[int]) -> list[HidingOp]:
    """The same ops with one more between two sections, behind all of the first and before all of the
    second."""
    numbers = [*numbers]
    for op in ops[len(numbers) :]:  # what is read under other shapes is of the section in which it is made
        numbers.append(max(numbers[m] for m in op.makers))
    sections = range(max(numbers, default=0))
    out = [
        replace(op, makers=(*op.makers, len(ops) + n - 1)) if n else op
        for op, n in zip(ops, numbers, strict=True)
    ]
    members: list[list[int]] = [[] for _ in range(len(sections) + 1)]
    for j, n in enumerate(numbers):
        members[n].append(j)
    for n in sections:
        before = (len(ops) + n - 1,) if n else ()
        at = max((ops[j].position for j in members[n]), default=0.0)
        out.append(HidingOp((*members[n], *before), 0.0, False, False, at))
    return out


def is_packed(k: Kernels, members: Sequence[int]) -> bool:
    """Whether what is sent as one is packed first."""
    step = k.ops[members[0]].step
    return len(members) > 1 and isinstance(step, Box) and step.move.kind == "all_reduce"


def pool_gradients(k: Kernels) -> Iterator[tuple[int, Buffer]]:
    """The positions of gradients of max pooling, and the tensors that were pooled."""
    for i, op in enumerate(k.ops):
        if op.name == "select_and_scatter_add" and k.runs(i) and k.source(i, 0) is not None:
            pooled = k.source(i, 1)
            if pooled is not None:
                yield i, pooled


def sent_together(k: Kernels) -> list[tuple[int, ...]]:
    """Collectives that XLA sends as one.

    They are looked for in the order in which results need them, the first result first
    (`HloComputation::MakeInstructionPostOrder`).
    """
    return k.memo("sent together", lambda: _sent_together(k))


def _sent_together(k: Kernels) -> list[tuple[int, ...]]:
    makers = k.makers
    order = _by_results(k, makers)
    at = {i: j for j, i in enumerate(order)}
    sent = {
        at[i]: ((op.step.move.kind, op.step.move.axes, op.combines), sum(t.bytes for t in k.writes[i]))
        for i, op in enumerate(k.ops)
        if op.combines and isinstance(op.step, Box) and op.step.move.kind in COMBINED_KINDS and i in at
    }
    waits = [[at[m] for m in makers[i]] for i in order]
    found = units_in_order(waits, combining_groups(waits, sent)) if len(sent) > 1 else []
    return [tuple(sorted(order[j] for j in members)) for members in found if len(members) > 1]


def _by_results(k: Kernels, makers: Sequence[Sequence[int]]) -> list[int]:
    """Ops behind results, each after those that it waits for."""
    order, seen = list[int](), set[int]()
    stack = [(t.maker, False) for t in reversed([*k.ends.values()]) if t.maker >= 0]
    while stack:
        i, is_done = stack.pop()
        if is_done:
            order.append(i)
        elif i not in seen:
            seen.add(i)
            stack += [(i, True), *((m, False) for m in reversed(makers[i]) if m not in seen)]
    return order


def _siblings(k: Kernels, sent: Collection[int]) -> list[tuple[int, ...]]:
    """Kernels that are one: they read the same tensor and go through equally much, and none waits for the
    other (multi_output_fusion.cc).

    Arguments:
      sent: collectives that are sent as one, which are left out.
    """
    alike = dict[tuple[Buffer, float], list[int]]()
    behind = list[int]()  # which ops one waits for, a bit each
    for i, op in enumerate(k.ops):
        bits = 0
        for m in k.makers[i]:
            bits |= behind[m] | 1 << m
        behind.append(bits)
        reduces = op.kind is Fusing.ROOT and op.name.startswith("reduce_")
        if k.writes[i] and i not in sent and (op.kind is Fusing.LOOP or reduces):
            # What it goes through: what is reduced, or what is given.
            space = max(t.bytes for t in (k.writes[i][0], *(k.sources[i] if reduces else ())))
            for t in k.reads[i]:
                if t.maker >= 0:
                    alike.setdefault((t, space), []).append(i)
    groups: dict[int, list[int]] = {}
    for members in alike.values():
        first = groups.setdefault(members[0], [members[0]])
        for i in members[1:]:
            if i not in groups and not any(behind[i] >> j & 1 or behind[j] >> i & 1 for j in first):
                first.append(i)
                groups[i] = first
    return [tuple(sorted(g)) for g in {id(g): g for g in groups.values()}.values() if len(g) > 1]


COMBINED_KINDS = frozenset(["all_reduce", "all_gather", "reduce_scatter"])
COMBINED_BYTES = 30 * 2**20
"""What collectives that are sent as one give at most (`kDefaultReduceScatterCombineThreshold`, and so on)."""


def combining_groups(
    makers: Sequence[Sequence[int]], sent: Mapping[int, tuple[Hashable, float]]
) -> list[tuple[int, ...]]:
    """The positions of collectives that are sent as one.

    Arguments:
      makers: per op, the ops that it waits for; all come before it.
      sent: of each collective, with what it may be combined, and the bytes that it gives.

    >>> combining_groups([[], [], [0]], {0: ("x", 1.0), 1: ("x", 1.0), 2: ("x", 1.0)})
    [(0, 1)]
    """
    open_sets: dict[Hashable, _Set] = {}
    found: list[_Set] = []
    bit, behind = 1, [0] * len(makers)  # which collectives an op needs, a bit each
    for i, makes in enumerate(makers):
        for m in makes:
            behind[i] |= behind[m]
        if i not in sent:
            continue
        key, size = sent[i]
        same = open_sets.get(key)
        if same is None or same.bytes + size > COMBINED_BYTES or behind[i] & same.bits:
            same = open_sets[key] = _Set()
            found.append(same)
        same.members.append(i)
        same.bytes += size
        same.bits |= bit
        behind[i] |= bit
        bit <<= 1
    return [tuple(same.members) for same in found if len(same.members) > 1]


def units_in_order(makers: Sequence[Sequence[int]], sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """All ops, those of a set as one, in an order in which each finds made what it waits for.

    Sets that wait for each other are taken apart again.

    >>> units_in_order([[], [0], []], [(0, 2)])
    [(0, 2), (1,)]
    """
    if not sets:
        return [(i,) for i in range(len(makers))]
    inside = {i for members in sets for i in members}
    units = [*sets, *((i,) for i in range(len(makers)) if i not in inside)]
    unit_of = [0] * len(makers)
    for u, members in enumerate(units):
        for i in members:
            unit_of[i] = u
    users: list[list[int]] = [[] for _ in units]
    waits = [0] * len(units)
    for u, members in enumerate(units):
        for m in {unit_of[m] for i in members for m in makers[i]}:
            users[m].append(u)
            waits[u] += 1
    # A set has its turn with its last member, as in the program.
    ready = [(members[-1], u) for u, members in enumerate(units) if not waits[u]]
    heapq.heapify(ready)
    out: list[int] = []
    while ready:
        _, u = heapq.heappop(ready)
        out.append(u)
        for user in users[u]:
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, (units[user][-1], user))
    if len(out) < len(units):
        return units_in_order(makers, [units[u] for u in sorted(out) if u < len(sets)])
    return [units[u] for u in out]


@dataclass(slots=True)
class _Set:
    members: list[int] = field(default_factory=list)
    bytes: float = 0.0
    bits: int = 0
