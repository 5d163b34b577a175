"""What a reader calls things: the phase of an op, and a name for every tensor."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp.compat import core
from sbp.passes.program.control import ADDS
from sbp.passes.program.graph import Const, Graph, Node

PHASES = ("forward", "backward", "update")
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class Names:
    """The words for one graph.

    Arguments:
      graph: the logical graph.
      in_paths, out_paths: names of the leaves of arguments and results.
    """

    graph: Graph
    in_paths: Sequence[str] = ()
    out_paths: Sequence[str] = ()

    @cached_property
    def phases(self) -> Mapping[int, str]:
        """The phase of each node, by id.

        JAX marks what it differentiates in the name stack. What is not marked belongs to the forward if it
        feeds it, and to the update (of a program that has a backward) otherwise.
        """
        return dict(_phases(self.graph.nodes, PHASES[0]))

    @cached_property
    def _producers(self) -> Mapping[int, Node]:
        return self.graph.producers()

    @cached_property
    def _consumers(self) -> Mapping[int, Sequence[tuple[Node, int]]]:
        return self.graph.consumers()

    @cached_property
    def _known(self) -> Mapping[int, str]:
        """Arguments, results, gradients of arguments, and their next values."""
        outputs = {
            x: p for x, p in zip(self.graph.outputs, self.out_paths, strict=False) if not isinstance(x, Const)
        }
        names: dict[int, str] = dict(outputs)
        for v, path in zip(self.graph.inputs, self.in_paths, strict=False):
            uses = self._uses(v)
            if not any(self.phases[n.id] == "forward" for n in uses):
                continue
            for node in uses:
                if (
                    self.phases[node.id] == "update"
                    and self._same_shape(node, v)
                    and node.outputs[0] in outputs
                ):
                    names[node.outputs[0]] = f"new {path}"
                    self._name_gradient(node, v, path, names)
        names.update(zip(self.graph.inputs, self.in_paths, strict=False))
        names.update(self._inside(names))
        return names

    def _uses(self, v: int) -> list[Node]:
        """The ops that use an argument, also as an annotation or another layout of its shape has it."""
        found = [node for node, _ in self._consumers.get(v, ())]
        for node in found:  # which grows meanwhile
            if self._same_shape(node, v) and self.same_tensor(node.outputs[0]) == v:
                found += (user for user, _ in self._consumers.get(node.outputs[0], ()))
        return found

    def _inside(self, known: Mapping[int, str]) -> Iterator[tuple[int, str]]:
        """What enters a loop over micro-batches is called inside as it is outside."""
        for node in self.graph.nodes:
            if node.role.microbatches:
                (body,) = node.bodies
                n_const, n_carry = core.scan_counts(node.params, len(node.inputs))
                for i, (x, v) in enumerate(zip(node.inputs, body.inputs, strict=True)):
                    at = None if isinstance(x, Const) or n_const <= i < n_const + n_carry else x
                    while at is not None and at not in known:
                        at = self.same_tensor(at)
                    if at is not None:
                        yield v, known[at]

    def _same_shape(self, node: Node, v: int) -> bool:
        values = self.graph.values
        return len(node.outputs) == 1 and values[node.outputs[0]].shape == values[v].shape

    def _name_gradient(self, update: Node, v: int, path: str, names: dict[int, str]) -> None:
        """Walks back from the op that updates argument `v` to the one backward tensor of its shape."""
        found, seen, stack = set(), {v}, [*_values(update)]
        while stack:
            x = stack.pop()
            node = self._producers.get(x)
            if x in seen or node is None or self.graph.values[x].shape != self.graph.values[v].shape:
                continue
            seen.add(x)
            if self.phases[node.id] == "backward" or _steps_back(node):
                found.add(x)
            elif self.phases[node.id] == "update":
                names.setdefault(x, f"update of {path}")
                stack += _values(node)
        if len(found) > 1:  # stages add up their parts by themselves
            for x in found:
                if self._only_adds(found, x):
                    names.setdefault(x, f"part of the gradient of {path}")
        if len(found) != 1:
            return
        x = found.pop()
        names.setdefault(x, f"gradient of {path}")
        while (before := self.same_tensor(x)) is not None:
            x = before
            names.setdefault(x, f"gradient of {path}")
        node = self._producers.get(x)
        if node is not None and node.op in ADDS:
            for part in _values(node):
                names.setdefault(part, f"part of the gradient of {path}")

    def _only_adds(self, parts: Collection[int], v: int) -> bool:
        """Whether a part is added to other parts, and to nothing else of the backward pass."""
        for node, _ in self._consumers.get(v, ()):
            if node.op in ADDS:
                return all(x in parts or self._sums(parts, x) for x in _values(node))
        return False

    def _sums(self, parts: Collection[int], v: int) -> bool:
        """Whether a value is a sum of parts."""
        node = self._producers.get(v)
        if node is None or node.op not in ADDS:
            return False
        return all(x in parts or self._sums(parts, x) for x in _values(node))

    def same_tensor(self, v: int) -> int | None:
        """The value that `v` only holds in another layout, if there is one."""
        node = self._producers.get(v)
        return next(_values(node), None) if node is not None and self.graph.keeps_elements(node) else None

    def of(self, v: int) -> str:
        """The name of a value: what it is to the user, else the op that makes it."""
        at: int | None = v
        while at is not None and at not in self._known:
            at = self.same_tensor(at)
        if at is not None:
            return self._known[at]
        node = self._producers.get(v)
        if node is None:
            return self.graph.values[v].name
        if (part := _addend(node, v)) is not None:
            while (before := self.same_tensor(part)) is not None:
                part = before
            return f"sum of {self.of(part)}"
        return f"{node.op} (backward)" if self.phases[node.id] == "backward" else node.op


def loop_name(node: Node) -> str:
    """What the user calls a loop or a branch."""
    return "sbp.microbatch" if node.role.microbatches else node.op


def _addend(node: Node, v: int) -> int | None:
    """What a loop over micro-batches adds up to its result `v`, if that is one tensor."""
    if not node.role.microbatches:
        return None
    (body,) = node.bodies
    end = body.outputs[node.outputs.index(v)]
    last = next((n for n in body.nodes if end in n.outputs), None)
    if last is None or last.op not in ("add", "add_any"):
        return None
    addends = [x for x in _values(last) if x not in body.inputs]
    return addends[0] if len(addends) == 1 else None


def _phases(nodes: Sequence[Node], default: str, last: str = PHASES[-1]) -> Iterator[tuple[int, str]]:
    """The phases of the ops of a graph or body; `default` is that of a body's op.

    Arguments:
      last: what is not marked and comes after the backward pass; of micro-batches it adds up their gradients.
    """
    marked = {n.id: n.role.direction for n in nodes}
    back = {n.id for n in nodes if marked[n.id] == "backward" or _steps_back(n)}
    late: set[int] = set()
    for node in nodes:
        if node.id in back or (not marked[node.id] and late.intersection(_values(node))):
            late.update(node.outputs)
    early: set[int] = set()
    has_backward = bool(back)
    for node in reversed(nodes):
        phase = marked[node.id]
        if not phase and has_backward:
            feeds = early.intersection(node.outputs) and not late.intersection(node.outputs)
            phase = "forward" if feeds or _steps_back(node) else last
        phase = phase or default
        if marked[node.id] or phase != last:
            early.update(_values(node))
        yield node.id, phase
        for body in node.bodies:
            yield from _phases(body.nodes, phase, PHASES[1] if node.role.microbatches else last)


def _steps_back(node: Node) -> bool:
    """Whether a loop over micro-batches has a backward pass inside."""
    return node.role.microbatches and any(
        n.role.direction == "backward" for b in node.bodies for n in b.nodes
    )


def _values(node: Node) -> Iterator[int]:
    """The operands that are values."""
    return (x for x in node.inputs if not isinstance(x, Const))


def without_indices(text: str) -> str:
    """A path that does not tell one layer from another.

    >>> without_indices("params['layers'][3]['w']")
    "params['layers'][*]['w']"
    """
    return _INDEX.sub("[*]", text)


def common(texts: Iterable[str]) -> str:
    """One text for several: where they differ in an index only, with `[*]` there.

    >>> common(["p['l'][0]['w'][2]", "p['l'][1]['w'][2]"])
    "p['l'][*]['w'][2]"
    >>> common(["mul", "mul", "add"])
    'mul, add'
    """
    every = list(texts)
    unique = list(dict.fromkeys(every))
    if len(unique) == 1:
        return unique[0]
    if len({without_indices(t) for t in unique}) == 1:
        indices = [_INDEX.findall(t) for t in unique]
        same = iter([len(set(column)) == 1 for column in zip(*indices, strict=True)])
        return _INDEX.sub(lambda m: m[0] if next(same) else "[*]", unique[0])
    counts = Counter(without_indices(t) for t in every).most_common()
    if len(counts) <= 2:
        return ", ".join(t for t, _ in counts)
    return f"{counts[0][0]} and {len(counts) - 1} more"
