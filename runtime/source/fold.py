"""Equal parts of a program as one function that is called several times: layers, updates of weights."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from sbp.passes.render.repeats import Repeat, repeats
from sbp.runtime.source.lines import MARKER, PICK, CodeLine, Function, ids_in, read_values
from sbp.runtime.source.text import marker
from sbp.runtime.source.values import Var

TokenOf: TypeAlias = Callable[[CodeLine], Hashable]
TitleOf: TypeAlias = Callable[[Sequence[CodeLine]], str]
_FEW = 3
"""Lines that a value of one weight's update is used by, at the most."""
LEAST = 3
"""Lines of what becomes a function."""
FREE = (1, 2)
"""How often a line may be said, at the most, to stand in front of layers instead: tried in this order."""


@dataclass
class Fold:
    """Folds lists of lines.

    Arguments:
      fresh: numbers for functions.
      token: of a line, what is the same in another layer beside its code.
      late: whether a line is of the update of the weights.
      title: of some lines, what a function of them is called.
      picks: parts of values that are written inside other expressions, each as a line of its own.
      functions: takes what is found, in an order in which each stands before its calls.
    """

    fresh: Iterator[int]
    token: TokenOf
    late: Callable[[CodeLine], bool]
    title: TitleOf
    picks: Mapping[str, CodeLine] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)

    def lines(self, lines: Sequence[CodeLine], results: Sequence[int]) -> list[CodeLine]:
        """The same lines, with calls for those that repeat.

        What does not depend on a layer, and is not said in every layer, stands in front of them, where that
        makes for fewer lines: a mask that the first layer computes and all of them use, the key of each.

        Arguments:
          results: the values that are needed after them.
        """
        inner = [self._inside(line) for line in self._by_weight(lines)]
        found = [self._folded(inner, frozenset(), results)]
        for most in FREE:
            apart = self._picked(inner, most)
            found.append(self._folded(apart, self._free(apart, most), results))
        best, functions = min(found, key=_size)
        self.functions += functions
        return best

    def _folded(
        self,
        lines: Sequence[CodeLine],
        free: frozenset[int],
        results: Sequence[int],
    ) -> tuple[list[CodeLine], list[Function]]:
        """Lines with calls for those that repeat, and the functions that are called.

        Arguments:
          free: positions of lines that may stand in front of what repeats.
        """
        kept = [k for k in range(len(lines)) if k not in free]
        rest = [lines[k] for k in kept]
        reads, last = _uses(rest, results)

        def borders(r: Repeat) -> int:
            return max(
                len(self._enters(reads, rest, p)) + len(self._leaves(last, rest, p)) for p in r.parts()
            )

        found = repeats([self._token(line) for line in rest], borders)
        spans = [(kept[r.start], kept[r.end - 1]) for r in found]
        front = {k: start for start, end in spans for k in free if start < k < end}
        order = sorted(range(len(lines)), key=lambda k: (front.get(k, k), k not in front, k))
        inner = [lines[k] for k in order]
        _, last = _uses(inner, results)
        functions: list[Function] = []
        out: list[CodeLine] = []
        done = 0
        for r, (_, end) in zip(found, spans, strict=True):
            part = r.shift(sum(k < end for k in free))
            out += inner[done : part.start]
            out += self._parts(inner, last, list(part.parts()), functions)
            done = part.end
        return [*out, *inner[done:]], functions

    def _free(self, lines: Sequence[CodeLine], most: int) -> frozenset[int]:
        """The positions of lines that depend on nothing but each other, and on what is made outside.

        Arguments:
          most: how often a line is said at the most: what stands in each of many layers stays there.
        """
        tokens = [self._token(line) for line in lines]
        count = Counter(tokens)
        inside = {v.id for line in lines for v in line.targets}
        found: set[int] = set()
        for k, line in enumerate(lines):
            if line.pure and count[tokens[k]] <= most and inside.isdisjoint(read_values(line)):
                found.add(k)
                inside -= {v.id for v in line.targets}
        return frozenset(found)

    def _picked(self, lines: Sequence[CodeLine], most: int) -> list[CodeLine]:
        """Lines with those of their own for parts of what depends on no layer, as `keys[3]`."""
        free = self._free(lines, most)
        inside = {v.id for k, line in enumerate(lines) if k not in free for v in line.targets}
        out: list[CodeLine] = []
        known: set[str] = set()
        for line in lines:
            codes = {m[0] for m in PICK.finditer(line.code) if int(m[1]) not in inside} & self.picks.keys()
            codes -= {line.code}
            own = [self.picks[code] for code in sorted(codes)]
            out += [one for one in own if one.code not in known]
            known |= codes
            code = line.code
            for one in own:
                code = code.replace(one.code, marker(one.targets[0].id))
            out.append(replace(line, code=code) if own else line)
        return out

    def _by_weight(self, lines: Sequence[CodeLine]) -> list[CodeLine]:
        """Lines of an update, those of one weight after the other; what all of them need comes first."""
        out: list[CodeLine] = []
        for update, run in itertools.groupby(lines, self.late):
            some = list(run)
            out += _together(some) if update else some
        return out

    def _inside(self, line: CodeLine) -> CodeLine:
        if not line.defs:
            return line
        defs = tuple(replace(f, lines=tuple(self.lines(f.lines, ids_in(f.results)))) for f in line.defs)
        return replace(line, defs=defs)

    def _token(self, line: CodeLine) -> Hashable:
        return canonical([line]), self.token(line)

    def _enters(self, reads: Sequence[Sequence[int]], lines: Sequence[CodeLine], part: range) -> list[int]:
        made = {v.id for k in part for v in lines[k].targets}
        return [i for i in dict.fromkeys(i for k in part for i in reads[k]) if i not in made]

    def _leaves(self, last: dict[int, int], lines: Sequence[CodeLine], part: range) -> list[int]:
        made = [v.id for k in part for v in lines[k].targets]
        return [i for i, v in enumerate(made) if last.get(v, -1) >= part.stop]

    def _parts(
        self,
        lines: Sequence[CodeLine],
        last: dict[int, int],
        parts: Sequence[range],
        functions: list[Function],
    ) -> list[CodeLine]:
        """Parts of a repeat, those that are equal as calls of one function, which is added to some."""
        kinds: dict[str, list[range]] = {}
        for part in parts:
            kinds.setdefault(canonical([lines[k] for k in part]), []).append(part)
        made: dict[str, tuple[Function, list[int]]] = {}
        out: list[CodeLine] = []
        for part in parts:
            own = [lines[k] for k in part]
            same = kinds[canonical(own)]
            if len(same) < 2 or len({self._token(line) for line in own}) < LEAST:
                out += own
                continue
            key = canonical(own)
            if key not in made:
                made[key] = self._function(lines, last, same)
                functions.append(made[key][0])
            function, leaves = made[key]
            targets = [v for line in own for v in line.targets]
            reads = list(dict.fromkeys(i for line in own for i in read_values(line)))
            inside = {v.id for v in targets}
            args = ", ".join(marker(i) for i in reads if i not in inside)
            out.append(CodeLine(tuple(targets[i] for i in leaves), f"{marker(function.id)}({args})", None))
        return out

    def _function(
        self, lines: Sequence[CodeLine], last: dict[int, int], same: Sequence[range]
    ) -> tuple[Function, list[int]]:
        """The function of equal parts, and the positions of its results among what its lines make."""
        leaves = sorted({i for part in same for i in self._leaves(last, lines, part)})
        first = []
        for k in same[0]:
            every = [lines[part.start + k - same[0].start] for part in same]
            kinds = {tuple((v.shape, str(v.dtype)) for v in line.targets) for line in every}
            steps = tuple(line.step for line in every)
            first.append(replace(lines[k], alike=steps, varied=len(kinds) > 1))
        made = [v for line in first for v in line.targets]
        inside = {v.id for v in made}
        reads = list(dict.fromkeys(i for line in first for i in read_values(line) if i not in inside))
        params = tuple((Var(i, (), np.dtype(bool)),) for i in reads)
        alike = tuple(_numbers([lines[k] for k in part]) for part in same)
        results = ", ".join(marker(made[i].id) for i in leaves)
        return Function(
            next(self.fresh), self.title(first), params, tuple(first), results, len(same), alike
        ), leaves


def _numbers(lines: Sequence[CodeLine]) -> tuple[int, ...]:
    """What some lines read of others, and what they make."""
    own = [v.id for line in lines for v in line.targets]
    return (*dict.fromkeys(i for line in lines for i in read_values(line) if i not in own), *own)


def _together(lines: Sequence[CodeLine]) -> list[CodeLine]:
    """The same lines, those that use each other's values together, if that can be done."""
    maker = {v.id: k for k, line in enumerate(lines) for v in line.targets}
    reads = [[maker[i] for i in read_values(line) if i in maker] for line in lines]
    readers = Counter(k for used in reads for k in used)
    group = list(range(len(lines)))

    def root(k: int) -> int:
        while group[k] != k:
            k = group[k]
        return k

    for k, used in enumerate(reads):
        own = [j for j in used if readers[j] <= _FEW]
        # A line that reads of many weights, as a norm of all does, belongs to none.
        for j in own if len(own) <= _FEW else ():
            if root(j) != root(k):
                group[root(k)] = group[root(j)] = min(root(j), root(k))
    needed = {root(k) for k in range(len(lines)) if readers[k] > _FEW}
    order = sorted(range(len(lines)), key=lambda k: (root(k) not in needed, root(k), k))
    place = {k: at for at, k in enumerate(order)}
    if any(place[j] > place[k] for k, used in enumerate(reads) for j in used):
        return list(lines)
    return [lines[k] for k in order]


def _uses(lines: Sequence[CodeLine], results: Sequence[int]) -> tuple[list[list[int]], dict[int, int]]:
    """What each line reads, and where each value is read last."""
    reads = [read_values(line) for line in lines]
    last: dict[int, int] = {}
    for at, ids in enumerate(reads):
        last.update(dict.fromkeys(ids, at))
    return reads, last | dict.fromkeys(results, len(lines))


def _size(found: tuple[Sequence[CodeLine], Sequence[Function]]) -> int:
    """Lines of a program and of its functions."""
    return len(found[0]) + sum(len(f.lines) for f in found[1])


def canonical(lines: Sequence[CodeLine]) -> str:
    """Lines with numbers for values in the order in which they appear: the same for equal parts."""
    numbers: dict[str, str] = {}

    def text(line: CodeLine) -> Iterator[str]:
        for f in line.defs:
            yield "".join(f"({','.join(marker(v.id) for v in group)})" for group in f.params) + marker(f.id)
            for inner in f.lines:
                yield from text(inner)
            yield f.results
        yield f"{','.join(marker(v.id) for v in line.targets)}={line.code}"

    whole = "\n".join(part for line in lines for part in text(line))
    return MARKER.sub(lambda m: f"«{numbers.setdefault(m[1], str(len(numbers)))}»", whole)


def without_copies(lines: Sequence[CodeLine], results: str) -> tuple[list[CodeLine], str]:
    """Lines without those that say the same as one before."""
    known: dict[str, CodeLine] = {}
    same: dict[str, str] = {}

    def now(code: str) -> str:
        return MARKER.sub(lambda m: f"«{same.get(m[1], m[1])}»", code)

    def renamed(line: CodeLine) -> CodeLine:
        defs = tuple(
            replace(f, lines=tuple(map(renamed, f.lines)), results=now(f.results)) for f in line.defs
        )
        return replace(line, code=now(line.code), defs=defs)

    out: list[CodeLine] = []
    for line in map(renamed, lines):
        if line.pure:
            first = known.setdefault(line.code, line)
            if first is not line and len(first.targets) == len(line.targets):
                pairs = zip(line.targets, first.targets, strict=True)
                same.update({str(a.id): str(b.id) for a, b in pairs})
                continue
        out.append(line)
    return out, now(results)
