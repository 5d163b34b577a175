"""What runs between the groups of a program: tensors, and the collectives that they go through.

A collective stands in the group around the line that wants what it makes; those of equal layers are one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from sbp.passes.render.outline import Outline
from sbp.signature import NdSbp, Split, parse_sbp

WordedVersion: TypeAlias = tuple[int, str]
"""A value and its signature in words."""
PlaceKey: TypeAlias = tuple[Any, ...]
Steps: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Sent:
    """Collectives that stand in one place.

    Arguments:
      parent: the group around it.
      rows: of the plan.
    """

    kind: str
    parent: int
    rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class EdgeLoad:
    """What runs along an edge.

    Arguments:
      versions: with the bytes of a device's shard of each.
      next: whether all of it goes to another of the equal layers that the group stands for.
    """

    versions: dict[WordedVersion, float] = field(default_factory=dict)
    next: bool = True


@dataclass
class Wiring:
    """The edges of a program, and the collectives.

    Nodes are numbered: groups as in the outline, then collectives.

    Arguments:
      mesh: sizes of the placement's axes.
      readers: of every argument, the nodes that read it.
      makers: of every result, by its position, the node that it comes from.
    """

    outline: Outline
    mesh: Sequence[int]
    collectives: list[Sent] = field(default_factory=list)
    edges: dict[tuple[int, int], EdgeLoad] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)
    makers: dict[int, int] = field(default_factory=dict)
    versions: dict[int, list[WordedVersion]] = field(default_factory=dict)

    @classmethod
    def of(cls, outline: Outline, mesh: Sequence[int]) -> Wiring:
        """That of an outlined program."""
        found = cls(outline, mesh)
        walk = _Walk(found)
        walk.run(outline.program["steps"])
        for k, (v, nd) in enumerate(outline.program["outputs"]):
            if v is not None and (at := walk.holder.get((v, nd))) is not None:
                found.makers[k] = at
        return found

    def bytes(self, version: WordedVersion) -> float:
        """Of one device's shard."""
        shape, _, itemsize = self.outline.program["values"][str(version[0])]
        return shard_elements(shape, _parsed(version[1]), self.mesh) * float(itemsize)

    def connect(self, source: int, target: int, version: WordedVersion, is_next: bool) -> None:
        """Has a version run from one node to another."""
        carried = self.edges.setdefault((source, target), EdgeLoad())
        carried.versions[version] = self.bytes(version)
        carried.next = carried.next and is_next


_parsed = lru_cache(maxsize=None)(parse_sbp)


def shard_elements(shape: Sequence[int], nd: NdSbp, mesh: Sequence[int]) -> int:
    """Elements of the largest shard.

    >>> shard_elements([6, 4], parse_sbp("[S(0), B]"), [4, 2])
    8
    """
    dims = list(shape)
    for s, size in zip(nd, mesh, strict=True):
        if isinstance(s, Split):
            dims[s.dim] = -(-dims[s.dim] // size)
    return math.prod(dims)


@dataclass
class _Walk:
    """Goes through the steps in order, and remembers where every version comes from.

    Arguments:
      holder: the node that a version comes from; none for arguments.
      copies: which of equal layers it comes from, as `Outline.copy` says it.
      places: the collective that stands in a place.
      given: of values inside loops, the argument that enters as each.
    """

    wiring: Wiring
    holder: dict[WordedVersion, int] = field(default_factory=dict)
    copies: dict[WordedVersion, tuple[int, int]] = field(default_factory=dict)
    places: dict[PlaceKey, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)

    @cached_property
    def first_readers(self) -> Mapping[WordedVersion, int]:
        """The op or loop that reads a version first, moves between left out: the address of its step."""
        found: dict[WordedVersion, int] = {}
        for step in reversed(list(_flat(self.wiring.outline.program["steps"]))):
            if "move" in step:
                v = step["value"]
                if (at := found.get((v, step["after"]))) is not None:
                    found[v, step["before"]] = at
            else:
                found.update({(v, nd): id(step) for v, nd in step["reads"]})
        return found

    def run(self, steps: Steps) -> None:
        for step in steps:
            if "move" in step:
                self.move(step)
            elif "op" in step:
                self.op(step)
            else:
                self.loop(step)

    def op(self, step: Mapping[str, Any]) -> None:
        at = self.wiring.outline.leaf.get(id(step))
        if at is None:  # made of constants
            return
        copy = self.wiring.outline.copy.get(id(step))
        self.read(map(_version, step["reads"]), at, copy)
        for s in step["sends"]:
            parent = self.wiring.outline.groups[at].parent
            node = self.node(("inside", s["kind"], at), s["kind"], parent, s["row"])
            for version in map(_version, step["reads"]):
                self.read([version], node, copy)
                self.wiring.connect(node, at, version, is_next=False)
        for version in map(_version, step["writes"]):
            self.put(version, at, copy)
            if copy is None or copy[1] == 0:
                self.wiring.versions.setdefault(at, []).append(version)

    def put(self, version: WordedVersion, at: int, copy: tuple[int, int] | None) -> None:
        self.holder[version] = at
        if copy is not None:
            self.copies[version] = copy

    def read(self, versions: Iterable[WordedVersion], at: int, copy: tuple[int, int] | None) -> None:
        for version in versions:
            source, made_in = self.holder.get(version), self.copies.get(version)
            argument = self.given.get(version[0], version[0])
            if source is None and argument in self.wiring.outline.arguments:
                readers = self.wiring.readers.setdefault(argument, [])
                if at not in readers:
                    readers.append(at)
            elif source is not None and source != at:
                is_next = bool(copy and made_in and copy[0] == made_in[0] and copy != made_in)
                self.wiring.connect(source, at, version, is_next)

    def move(self, step: Mapping[str, Any]) -> None:
        v = step["value"]
        before, after = (v, step["before"]), (v, step["after"])
        if "row" not in step:
            if before in self.holder:
                self.put(after, self.holder[before], self.copies.get(before))
            return
        outline = self.wiring.outline
        reader = self.first_readers.get(after)
        leaf = outline.leaf.get(reader, -1) if reader is not None else self.holder.get(before, -1)
        parent = outline.groups[leaf].parent if 0 <= leaf < len(outline.groups) else 0
        shape = tuple(outline.program["values"][str(v)][0])
        key = parent, leaf, step["move"], step["before"], step["after"], tuple(step["axes"]), shape
        node = self.node(key, step["move"], parent, step["row"])
        copy = outline.copy.get(reader) if reader is not None else self.copies.get(before)
        self.read([before], node, copy)
        self.put(after, node, copy)

    def node(self, key: PlaceKey, kind: str, parent: int, row: int) -> int:
        """The collective of a place, with one row more."""
        w = self.wiring
        if key not in self.places:
            self.places[key] = len(w.outline.groups) + len(w.collectives)
            w.collectives.append(Sent(kind, parent))
        at = self.places[key]
        rows = w.collectives[at - len(w.outline.groups)].rows
        if row not in rows:
            rows.append(row)
        return at

    def loop(self, step: Mapping[str, Any]) -> None:
        for outside, enters, _, _ in step["wires"]:
            if outside is not None and (source := self.holder.get(_version(outside))) is not None:
                for version in map(_version, enters):
                    self.put(version, source, self.copies.get(_version(outside)))
            elif outside is not None:
                self.given.update(
                    dict.fromkeys((v for v, _ in enters), self.given.get(outside[0], outside[0]))
                )
        for body in step["bodies"]:
            self.run(body)
        for _, _, leaves, outside in step["wires"]:
            ends = [self.holder[x] for x in map(_version, leaves) if x in self.holder]
            if outside is not None and ends:
                self.put(_version(outside), ends[0], self.copies.get(_version(leaves[0])))


def _version(pair: Sequence[Any]) -> WordedVersion:
    return pair[0], pair[1]


def _flat(steps: Steps) -> Iterator[Mapping[str, Any]]:
    """Every step, those of bodies too."""
    for step in steps:
        yield step
        for body in step.get("bodies", ()):
            yield from _flat(body)
