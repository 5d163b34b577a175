"""A program as a person thinks of it: passes over the model, its layers, their functions, their lines.

In: a program as JSON has it (program_data.py), so that a plan from a file is drawn as well as one that was
just made. Out: groups within groups, whose leaves are lines with their ops. Layers are what repeats
(repeats.py); equal ones are one group that says how many it stands for, with their ops in the same leaves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

from sbp.passes.program.names import PHASES, common
from sbp.passes.render.repeats import Repeat, layer_runs, mark_number, ranged_marks, repeats, short_mark

OpId: TypeAlias = int
"""The address of a step of the JSON, which lives as long as the program."""
_NUMBERED = re.compile(r"^([^\[.]*)((?:\['[^']*'\]|\.\w+|\[\d+\])*\[\d+\])")
COVERED = 0.75
"""Of layers, how many must be among what repeats, for these to be taken for layers."""
LOOP = "loop"
ORDER = (PHASES[0], LOOP, *PHASES[1:])
"""Phases and loops over all of them, as they are shown."""


@dataclass(slots=True)
class Group:
    """Part of a program.

    Arguments:
      kind: "phase", "layer", "scope", "function", "line", "loop" or "program".
      where: the user's lines.
      times: how many equal parts it stands for.
      parent: the group around it; -1 for none.
      ops: steps of all that it stands for, those of groups inside counted.
      seconds: of kernels, per step of the program, likewise.
    """

    kind: str
    title: str
    where: str
    parent: int
    times: int = 1
    ops: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class OutlineItem:
    """An op or a loop at one level.

    Arguments:
      times: how often it runs in a step of the program, as its seconds count.
      items: of a loop, the items of its bodies.
    """

    step: Mapping[str, Any]
    times: int
    items: tuple[OutlineItem, ...] = ()

    @property
    def phase(self) -> str:
        """Of a loop over everything "loop"."""
        phases = {i.phase for i in self.items}
        if len(phases) > 1:
            return LOOP
        return phases.pop() if phases else str(self.step["phase"])

    @property
    def token(self) -> Hashable:
        """What stands in its place in another layer is called the same."""
        return self.step.get("op", self.step.get("loop")), self.step["at"]


CAST = "convert_element_type"


@dataclass
class Outline:
    """The groups of a program, the whole of it first.

    Arguments:
      program: as JSON has it.
      paths: what its arguments are called.
      leaf: the group of every op.
      copy: of ops of layers that are equal: which group stands for these, and the how many-th this one is.
    """

    program: Mapping[str, Any]
    paths: Sequence[str]
    groups: list[Group] = field(default_factory=list)
    leaf: dict[OpId, int] = field(default_factory=dict)
    copy: dict[OpId, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Mapping[str, Any], paths: Sequence[str]) -> Outline:
        """The outline of a program."""
        found = cls(program, paths)
        found.groups.append(Group("program", "program", "", -1))
        found.divide(list(items(program["steps"], 1)), 0)
        found.add_up()
        found.squeeze()
        return found

    @cached_property
    def arguments(self) -> Mapping[int, str]:
        """What values are called that the program is given."""
        found = dict(zip((v for v, _ in self.program["inputs"]), self.paths, strict=False))
        for step in self.casts.values():
            path = found.get(step["reads"][0][0])
            found.update({v: path for v, _ in step["writes"]} if path is not None else {})
        return found

    @cached_property
    def casts(self) -> Mapping[OpId, Mapping[str, Any]]:
        """Ops that only change a type: a weight that all layers cast at once keeps its name in each."""
        every = (i.step for i in items(self.program["steps"], 1))
        return {id(s): s for s in every if s.get("op") == CAST and len(s["reads"]) == 1}

    def divide(self, found: Sequence[OutlineItem], parent: int) -> None:
        """Puts items into groups: by the pass over the model, by layers, by functions, by lines."""
        phases = [p for p in ORDER if any(i.phase == p for i in found)]
        for phase in phases:
            own = [i for i in found if i.phase == phase]
            if phase == LOOP:
                self.lines(own, parent)
                continue
            at = parent if len(phases) == 1 and parent else self.add("phase", phase, own, parent)
            if phase == PHASES[-1]:
                self.functions(own, at)
            else:
                self.layers(own, at)

    def layers(self, found: Sequence[OutlineItem], parent: int) -> None:
        """Puts what repeats into a group for each layer, or one for all that are equal."""
        marks = [(self.numbers_of(i), numbered_scope(i)) for i in found]

        def mixed(r: Repeat) -> int:
            # Where one layer ends is not to be seen from the lines alone; its weights tell it from the next.
            both = ((set().union(*(marks[k][n] for k in part)) for n in (0, 1)) for part in r.parts())
            return sum(len(weights) > 1 or len(scopes) > 1 for weights, scopes in both)

        done, repeated = 0, repeats([i.token for i in found], mixed)
        runs = self.items_by_layer(found, [m for m, _ in marks])
        layers, covered = sum(1 for mark, _ in runs if mark), sum(r.times for r in repeated)
        if layers and (any(map(mixed, repeated)) or covered < COVERED * layers):
            # What repeats crosses layers or misses some, as where these have ops that others do not.
            for is_layer, some in groupby(runs, key=lambda run: bool(run[0])):
                own = [part for _, part in some]
                if is_layer:
                    self.equal(own, parent)
                else:
                    self.functions([i for part in own for i in part], parent)
            return
        for r in repeated:
            self.functions(found[done : r.start], parent)
            self.equal([[found[k] for k in part] for part in r.parts()], parent)
            done = r.end
        self.functions(found[done:], parent)

    def items_by_layer(
        self, found: Sequence[OutlineItem], marks: Sequence[frozenset[str]]
    ) -> list[tuple[str, list[OutlineItem]]]:
        """Items by the layers whose weights they read."""
        runs = layer_runs(marks, list(map(self.function, found)), list(map(self.reads_unnumbered, found)))
        return [(mark, [found[k] for k in part]) for mark, part in runs]

    @cached_property
    def heads(self) -> frozenset[str]:
        """The arguments that have the weights of layers."""
        return frozenset(path.partition("[")[0] for path in self.arguments.values() if _NUMBERED.match(path))

    def reads_unnumbered(self, i: OutlineItem) -> bool:
        """Whether an op reads a leaf of what also has the weights of layers, and no layer's."""
        read = (self.arguments.get(v, "") for one in _all([i]) for v, _ in one.step["reads"])
        return any(
            "[" in path and path.partition("[")[0] in self.heads for path in read
        ) and not self.numbers_of(i)

    def equal(self, parts: Sequence[Sequence[OutlineItem]], parent: int) -> None:
        """Puts parts that repeat into a group for all that are equal to the last bit."""
        kinds: dict[Hashable, list[Sequence[OutlineItem]]] = {}
        for part in parts:
            kinds.setdefault(tuple(map(self.exactly, part)), []).append(part)
        for same in kinds.values():
            at = self.add("layer", self.layer_title(same), same[0], parent, len(same))
            self.functions(same[0], at, is_layer=True)
            for n, other in enumerate(same):
                self.copy.update({id(i.step): (at, n) for i in _all(other)})
                for one, i in zip(_all(same[0]), _all(other), strict=True) if n else ():
                    self.leaf[id(i.step)] = leaf = self.leaf[id(one.step)]
                    if not i.items:
                        self.fill(leaf, i)

    def functions(self, found: Sequence[OutlineItem], parent: int, *, is_layer: bool = False) -> None:
        """Puts items into groups by scope, by function and by line; in a layer its own scope says nothing."""

        def place(i: OutlineItem) -> tuple[str, str]:
            names = scope_of(i)
            own = [n for n in names if not (is_layer and n[-1].isdigit())]
            return "/".join(own), self.function(i)

        calls = list(items_by_call(found, place))
        scopes: dict[str, int] = {"": parent}
        for (scope, function), own in calls:
            at = self.scope(scope, own, parent, scopes)
            if function and len(calls) > 1:
                at = self.add("function", function, own, at)
            self.lines(own, at)

    def scope(self, scope: str, own: Sequence[OutlineItem], parent: int, known: dict[str, int]) -> int:
        """The group of a scope, inside those of the scopes around it."""
        if scope not in known:
            outer, _, name = scope.rpartition("/")
            known[scope] = self.add("scope", name, own, self.scope(outer, own, parent, known))
        return known[scope]

    def lines(self, found: Sequence[OutlineItem], parent: int) -> None:
        """Puts items into leaves by their lines, loops into groups of their own."""
        leaves: dict[str, int] = {}
        for i in found:
            if i.items:
                trips = i.step["trips"]
                title = f"{i.step['name']} x {trips}" if trips > 1 else i.step["name"]
                self.leaf[id(i.step)] = at = self.add("loop", title, [i], parent)
                self.divide(i.items, at)
                continue
            where = i.step["at"]
            if where not in leaves:
                leaves[where] = self.add("line", self.text(where), [i], parent)
            self.leaf[id(i.step)] = leaves[where]
            self.fill(leaves[where], i)

    def add(self, kind: str, title: str, found: Sequence[OutlineItem], parent: int, times: int = 1) -> int:
        """A new group; its number."""
        self.groups.append(Group(kind, title, _where(found), parent, times))
        return len(self.groups) - 1

    def fill(self, leaf: int, i: OutlineItem) -> None:
        """Counts an op for its leaf."""
        sent = sum(s["seconds"] for s in i.step.get("sends", ()))
        self.groups[leaf].ops += 1
        self.groups[leaf].seconds += i.times * max(0.0, i.step.get("seconds", 0.0) - sent)

    def add_up(self) -> None:
        """Counts what groups hold for those around them; a group stands before those inside it."""
        for g in reversed(self.groups[1:]):
            self.groups[g.parent].ops += g.ops
            self.groups[g.parent].seconds += g.seconds

    def squeeze(self) -> None:
        """Leaves out groups that are all there is in the group around them."""
        inside = Counter(g.parent for g in self.groups)
        alone = {
            k: g.parent
            for k, g in enumerate(self.groups)
            if g.kind in ("scope", "function") and g.parent > 0 and inside[g.parent] == 1
        }
        kept = [k for k in range(len(self.groups)) if k not in alone]
        number = {k: n for n, k in enumerate(kept)}
        for k, around in alone.items():  # what is around stands before
            number[k] = number[around]
        self.groups = [self.groups[k] for k in kept]
        for g in self.groups[1:]:
            g.parent = number[g.parent]
        self.leaf = {step: number[k] for step, k in self.leaf.items()}

    def numbers_of(self, i: OutlineItem) -> frozenset[str]:
        """The layers whose weights an op reads, by the part of their paths that numbers them."""
        if id(i.step) in self.casts:
            return frozenset()
        read = (self.arguments.get(v, "") for one in _all([i]) for v, _ in one.step["reads"])
        found = filter(None, map(_NUMBERED.match, read))
        # What has no name of its own, as a list that is an argument, has that of the argument.
        return frozenset(m[1] + m[2] if m[2][1].isdigit() else m[2] for m in found)

    def layer_title(self, same: Sequence[Sequence[OutlineItem]]) -> str:
        """What layers are called: by their weights, else by their functions."""
        marks = Counter(mark for part in same for i in part for mark in self.numbers_of(i))
        if marks:
            own = [m for m in marks if marks[m] * 2 >= max(marks.values())]
            return short_mark(common(sorted(own, key=mark_number))) if len(own) < 2 else ranged_marks(own)
        functions = Counter(f for i in same[0] if (f := self.function(i)))
        return " + ".join(f for f, _ in functions.most_common(2)) or "layer"

    def exactly(self, i: OutlineItem) -> Hashable:
        """What must be the same of ops for them to be the same op in another layer."""
        values = self.program["values"]
        lying = [(*values[str(v)][:2], nd) for v, nd in (*i.step["reads"], *i.step["writes"])]
        return i.token, str(lying), i.step.get("seconds"), tuple(map(self.exactly, i.items))

    def function(self, i: OutlineItem) -> str:
        """The function that an op stands in."""
        return str(self.program["lines"].get(i.step["at"], {}).get("function", ""))

    def text(self, where: str) -> str:
        """The user's text at a line; the line's name if there is none."""
        said = self.program["lines"].get(where)
        number = int(where.rpartition(":")[2]) if said else 0
        at = number - said["first"] if said else 0
        text = said["text"][at].strip() if said and 0 <= at < len(said["text"]) else ""
        return text or where


def items_by_call(
    found: Sequence[OutlineItem], place: Callable[[OutlineItem], tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], list[OutlineItem]]]:
    """Items by the calls of functions that they stand in, as far as that is to be seen.

    An op is of the last call of its function, unless it reads what others have made of the results of that
    one: then the function was called again.
    """
    calls: list[tuple[tuple[str, str], list[OutlineItem]]] = []
    latest: dict[tuple[str, str], int] = {}
    after: list[set[int]] = []  # per call, those that read what it made, and all after them
    maker: dict[int, int] = {}
    for i in found:
        key = place(i)
        read = {maker[v] for v, _ in i.step["reads"] if v in maker}
        at = latest.get(key)
        if at is None or read & after[at]:
            at = latest[key] = len(calls)
            calls.append((key, []))
            after.append(set())
        calls[at][1].append(i)
        before = {k for k in range(len(calls)) if k in read or after[k] & read} - {at}
        for k in before:
            after[k] |= {at, *after[at]}
        maker.update((v, at) for v, _ in i.step["writes"])
    return iter(calls)


def items(steps: Iterable[Mapping[str, Any]], times: int) -> Iterator[OutlineItem]:
    """The ops and loops of a list of steps; what is made of constants only belongs to nobody."""
    for step in steps:
        if "loop" in step:
            inner = [i for body in step["bodies"] for i in items(body, times * step["assumed_trips"])]
            if inner:
                yield OutlineItem(step, times, tuple(inner))
        elif "op" in step and step["reads"]:
            yield OutlineItem(step, times)


def scope_of(i: OutlineItem) -> list[str]:
    """The names of the scopes that an op stands in, the outermost first."""
    return [name for name in str(i.step.get("scope", "")).split("/") if name]


def numbered_scope(i: OutlineItem) -> frozenset[str]:
    """The scope that numbers the layer of an op, such as `layer3`."""
    return frozenset([name for name in scope_of(i) if name[-1].isdigit()][:1])


def _all(found: Iterable[OutlineItem]) -> Iterator[OutlineItem]:
    """Items and those inside them."""
    for i in found:
        yield i
        yield from _all(i.items)


def _where(found: Sequence[OutlineItem]) -> str:
    """The lines of some items, such as "gpt.py:136-145", of the file in which most are."""
    places = Counter(i.step["at"].rpartition(":")[::2] for i in _all(found) if ":" in i.step["at"])
    if not places:
        return ""
    files = Counter[str]()
    for (file, _), n in places.items():
        files[file] += n
    file = files.most_common(1)[0][0]
    lines = [int(line) for f, line in places if f == file]
    return f"{file}:{min(lines)}" + (f"-{max(lines)}" if len(lines) > 1 else "")
