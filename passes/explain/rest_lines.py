"""Arguments and results at rest: how each lies between two steps, and what arguments take of a device."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sbp.compat import core
from sbp.layout import local_shape
from sbp.passes.explain.plan import PlanData
from sbp.signature import NdSbp, format_sbp
from sbp.text.units import bytes_text

_KEY = re.compile(r"\[(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\]]*)\]|\.[^.\[]+|[^.\[]+")
_WORDS = re.compile(r"\w+ ")


@dataclass
class _Tree:
    """Leaves by the keys of their paths; `whole` counts those that the program has, here or not."""

    path: str
    whole: Counter[str]
    children: dict[str, _Tree] = field(default_factory=dict)
    leaf: tuple[int, NdSbp] | None = None

    def child(self, key: str) -> _Tree:
        return self.children.setdefault(key, _Tree(self.path + key, self.whole))


Line = tuple[str, NdSbp, tuple[int, ...]]
"""What is left of some leaves once equal ones are one line: path, signature, and which leaves they are."""


def collapse(
    paths: Sequence[str], sbps: Sequence[NdSbp], every: Sequence[str] = ()
) -> list[tuple[str, NdSbp, int]]:
    """Signatures at rest, a line for all neighbours that lie alike; layers that lie alike become `[*]`.

    Arguments:
      every: the paths that the program has, if `paths` are only some of them: `params` then means all of it.

    >>> from sbp.signature import parse_sbp
    >>> s, b = parse_sbp("S(0)"), parse_sbp("B")
    >>> collapse(["p[0]['w']", "p[0]['b']", "p[1]['w']", "p[1]['b']", "x"], [s, b, s, b, s])
    [("p[*]['w']", (S(0),), 2), ("p[*]['b']", (B,), 2), ('x', (S(0),), 1)]
    """
    return [(path, nd, len(leaves)) for path, nd, leaves in _collapsed(paths, sbps, every)]


def _collapsed(paths: Sequence[str], sbps: Sequence[NdSbp], every: Sequence[str]) -> list[Line]:
    """The same, with the positions of the leaves."""
    whole: Counter[str] = Counter()
    for path in every or paths:
        keys = _keys(path)
        whole.update("".join(keys[: i + 1]) for i in range(len(keys)))
    root = _Tree("", whole)
    for i, (path, nd) in enumerate(zip(paths, sbps, strict=True)):
        at = root
        for key in _keys(path):
            at = at.child(key)
        at.leaf = i, nd
    return [line for key, child in root.children.items() for line in _prefixed(key, _lines(child))]


def _keys(path: str) -> list[str]:
    """The keys of a path; the words for a tensor of another placement are no path.

    >>> _keys("p['l'][0].w"), _keys("from stage 0: tanh, mlp.py:3")
    (['p', "['l']", '[0]', '.w'], ['from stage 0: tanh, mlp.py:3'])
    """
    return [path] if _WORDS.match(path) else _KEY.findall(path) or [path]


def _lines(tree: _Tree) -> list[Line]:
    if tree.leaf is not None:
        return [("", tree.leaf[1], tree.leaf[:1])]
    groups: dict[tuple[tuple[str, NdSbp, int], ...], list[tuple[str, list[Line]]]] = {}
    for key, child in tree.children.items():
        lines = _lines(child)
        groups.setdefault(tuple((p, nd, len(x)) for p, nd, x in lines), []).append((key, lines))
    leaves = tuple(x for alike in groups.values() for _, lines in alike for _, _, xs in lines for x in xs)
    complete = len(leaves) == tree.whole[tree.path]
    kinds = {(path, nd) for lines in groups for path, nd, _ in lines}
    if complete and len(kinds) == 1 and next(iter(kinds))[0] == "":
        return [("", next(iter(kinds))[1], leaves)]
    whole = complete and len(groups) == 1
    out: list[Line] = []
    for alike in groups.values():
        same = zip(*(lines for _, lines in alike), strict=True)
        merged = [(each[0][0], each[0][1], tuple(x for _, _, xs in each for x in xs)) for each in same]
        out += _prefixed(_label([key for key, _ in alike], whole), merged)
    return out


def _prefixed(key: str, lines: Sequence[Line]) -> Iterator[Line]:
    return ((key + path, nd, leaves) for path, nd, leaves in lines)


def _label(keys: Sequence[str], whole: bool) -> str:
    """One key for several that lie alike."""
    if len(keys) == 1:
        return keys[0]
    if whole and all(re.fullmatch(r"\[\d+\]", k) for k in keys):
        return "[*]"
    inner = [k.strip("[].") for k in keys]
    listed = "|".join(inner) if len(inner) <= 4 else "|".join(inner[:3]) + f"|{len(inner) - 3} more"
    return f".{{{listed}}}" if keys[0].startswith(".") else f"[{listed}]"


def rest_lines(
    plan: PlanData, whole: PlanData | None = None
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Signatures of arguments and of results: (path, signature, a remark).

    The remark says how many leaves a line is of, and of arguments the bytes of a device. A result that lies
    as an argument with the same leaves is one line, `as params`. What other placements send is left out.

    Arguments:
      whole: the plan of the program that this one is of a placement of; `params` then means all of it.
    """
    every = plan if whole is None else whole
    own = [i for i, path in enumerate(plan.in_paths) if not path.startswith("from ")]
    gives = [i for i, path in enumerate(plan.out_paths) if not path.startswith("to ")]
    ins = _collapsed([plan.in_paths[i] for i in own], [plan.in_sbp[i] for i in own], every.in_paths)
    outs = _collapsed([plan.out_paths[i] for i in gives], [plan.out_sbp[i] for i in gives], every.out_paths)
    arguments = {lines: name for name, lines in _by_head(ins, 1).items() if len(lines) > 1}
    results = _by_head(outs, 1)
    if results.keys() == {"result"} and results["result"] not in arguments:
        results = _by_head(outs, 2)
    after: list[tuple[str, str, str]] = []
    for name, lines in results.items():
        if lines in arguments:
            after.append((name, f"as {arguments[lines]}", _leaves(sum(n for _, _, n in lines))))
        else:
            after += [(name + path, format_sbp(nd), _leaves(n)) for path, nd, n in lines]
    sizes = argument_bytes(plan)

    def remark(leaves: Sequence[int]) -> str:
        """What some arguments take."""
        size = [bytes_text(math.fsum(sizes[own[i]] for i in leaves))] if sizes else []
        return " in ".join([*size, *filter(None, [_leaves(len(leaves))])])

    return [(path, format_sbp(nd), remark(leaves)) for path, nd, leaves in ins], after


def argument_bytes(plan: PlanData) -> list[float]:
    """What each argument takes of a device; nothing where the program is not known."""
    if plan.physical is not None:
        graph = plan.physical.graph
        values = [graph.values[v] for v in graph.inputs]
        kinds = [(value.shape, core.itemsize(value.dtype)) for value in values]
    elif plan.program is not None:
        found = plan.program["values"]
        kinds = [(tuple(found[str(v)][0]), found[str(v)][2]) for v, *_ in plan.program["inputs"]]
    else:
        return []
    return [
        float(math.prod(local_shape(shape, nd, plan.placement.shape)) * size)
        for (shape, size), nd in zip(kinds, plan.in_sbp, strict=False)
    ]


def _leaves(n: int) -> str:
    return f"{n} leaves" if n > 1 else ""


def _by_head(lines: Sequence[Line], keys: int) -> dict[str, tuple[tuple[str, NdSbp, int], ...]]:
    """Lines by the first keys of their paths, with how many leaves they are of."""
    out: dict[str, tuple[tuple[str, NdSbp, int], ...]] = {}
    for path, nd, leaves in lines:
        head = "".join(_keys(path)[:keys])
        out[head] = (*out.get(head, ()), (path[len(head) :], nd, len(leaves)))
    return out
