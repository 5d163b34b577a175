"""How arguments arrive and results leave: a line per leaf, and one for leaves that lie as others do."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sbp.runtime.source.line_wrapping import WIDTH

LEAST = 3
"""Leaves of what has a name of its own."""


@dataclass(frozen=True, slots=True)
class SpecLine:
    """An argument or a result.

    Arguments:
      path: its name in the plan.
      spec: its `PartitionSpec`, as code.
      kind: its type.
    """

    path: str
    spec: str
    kind: str

    def line(self, root: str = "") -> str:
        """Its line, without the root of its path."""
        text = f"    {self.spec},  # {self.path.removeprefix(root)} {self.kind}"
        return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


@dataclass(frozen=True, slots=True)
class SpecTree:
    """Leaves that occur several times: weights, and what an optimizer keeps of each.

    Arguments:
      name: of the constant.
      root: of the paths of the first of them.
    """

    name: str
    root: str
    leaves: tuple[SpecLine, ...]

    def at(self, leaves: Sequence[SpecLine], start: int) -> str | None:
        """The root of the leaves from a position on, if they are such a tree; else None."""
        some = leaves[start : start + len(self.leaves)]
        tails = [own.path.removeprefix(self.root) for own in self.leaves]
        if len(some) < len(tails) or not some[0].path.endswith(tails[0]):
            return None
        root = some[0].path.removesuffix(tails[0])
        same = all(
            x.path == root + tail and (x.spec, x.kind) == (own.spec, own.kind)
            for x, own, tail in zip(some, self.leaves, tails, strict=True)
        )
        return root if same else None


def lines(tables: Sequence[tuple[str, Sequence[SpecLine]]], reserved: Sequence[str]) -> Iterator[str]:
    """The constants of some tables of leaves, by name.

    Arguments:
      reserved: names that trees must not have.
    """
    trees = [t for t in _trees(tables[0][1], reserved) if _count(t, [some for _, some in tables]) > 1]
    for k, tree in enumerate(trees):
        yield f"{tree.name} = ("
        yield from _table(tree.leaves, trees[:k], tree.root)
        yield from (")", "")
    for k, (name, leaves) in enumerate(tables):
        if k:
            yield ""
        if not leaves:
            yield f"{name} = ()"
            continue
        yield f"{name} = ("
        yield from _table(leaves, trees)
        yield ")"


def _table(leaves: Sequence[SpecLine], trees: Sequence[SpecTree], root: str = "") -> Iterator[str]:
    """The lines of some leaves, those that are a tree as one.

    Arguments:
      root: of their paths, which is left out.
    """
    at = 0
    while at < len(leaves):
        tree, own = next(((t, own) for t in trees if (own := t.at(leaves, at)) is not None), (None, ""))
        if tree is None:
            yield leaves[at].line(root)
            at += 1
        else:
            yield f"    *{tree.name},  # {own.removeprefix(root)}"
            at += len(tree.leaves)


def _trees(leaves: Sequence[SpecLine], reserved: Sequence[str]) -> Iterator[SpecTree]:
    """The leaves of each argument of several."""
    names = set(reserved)
    start = 0
    while start < len(leaves):
        root = _root(leaves[start].path)
        end = next((k for k in range(start, len(leaves)) if _root(leaves[k].path) != root), len(leaves))
        name = re.sub(r"\W+", "_", root).strip("_").upper()
        if end - start >= LEAST and name and name not in names:
            names.add(name)
            yield SpecTree(name, root, tuple(leaves[start:end]))
        start = end


def _root(path: str) -> str:
    """The argument that a leaf is of."""
    return re.match(r"\w*", path)[0]  # type: ignore[index]


def _count(tree: SpecTree, tables: Sequence[Sequence[SpecLine]]) -> int:
    return sum(tree.at(some, k) is not None for some in tables for k in range(len(some)))


def mesh_axes(spec: Any) -> str:
    """A `PartitionSpec` as code."""

    def entry(e: Any) -> str:
        if e is None or isinstance(e, str):
            return "None" if e is None else f'"{e}"'
        return "(" + ", ".join(f'"{x}"' for x in e) + ("," if len(e) == 1 else "") + ")"

    return f"PartitionSpec({', '.join(map(entry, spec))})"
