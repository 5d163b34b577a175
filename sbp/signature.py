"""Signatures: how one logical tensor lies along the axes of a placement.

A 1-D signature says what happens along ONE axis of the device hierarchy: `S(dim)` splits a dim, `B`
copies, `P(op)` means that the shards reduce to the tensor. A list of them, outer axis to inner, is an
N-D signature (OneFlow: "SBP", Yuan et al., 2021).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sbp.errors import Problem, SignatureError
from sbp.text.notebook import signature_html

PARTIAL_OPS = ("sum", "max", "min", "prod", "and", "or", "xor")
"""Reductions that do not ask in which order, or in which groups."""
LEGAL_PARTIALS = ", ".join(["P", *(f'P("{op}")' for op in PARTIAL_OPS)])

# Tensors are looked up by their signatures millions of times in a plan: hashes are written by hand below, in
# half the time of those that dataclasses make.


class _Auto:
    """What the compiler chooses: a signature, or the dim of a split; `sbp.AUTO` is its only instance."""

    def __repr__(self) -> str:
        return "AUTO"

    def __reduce__(self) -> str:
        return "AUTO"


AUTO = _Auto()


@dataclass(frozen=True, slots=True, init=False)
class Split:
    """The tensor's dim `dim` is cut into equal chunks along the axis.

    `S(AUTO)` is a split of an argument or a result along a dim that the planner chooses.

    >>> Split(0), Split(AUTO)
    (S(0), S(AUTO))
    """

    dim: int

    def __new__(cls, dim: int | _Auto = 0) -> Any:
        """A split, or the one of any dim."""
        return AUTO_SPLIT if dim is AUTO else object.__new__(cls)

    def __init__(self, dim: int | _Auto) -> None:
        object.__setattr__(self, "dim", dim)
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise SignatureError(
                Problem(
                    kind="signature",
                    where="S(...)",
                    got=f"S({self.dim!r})",
                    legal="an integer dim: S(0), S(1), S(-1), ...; or S(AUTO)",
                    why="a split names the dim of the tensor that is cut",
                    fix="give the position of the dim",
                )
            )

    def __hash__(self) -> int:
        return self.dim + 2  # hash(-1) is that of -2

    def __repr__(self) -> str:
        return f"S({self.dim})"

    def _repr_html_(self) -> str:
        return signature_html(repr(self), f"dim {self.dim} is cut into equal chunks along this axis")


@dataclass(frozen=True, slots=True)
class AutoSplit:
    """Some dim is cut into equal chunks along the axis: one that divides, which the planner chooses."""

    def __repr__(self) -> str:
        return "S(AUTO)"


AUTO_SPLIT = AutoSplit()


@dataclass(frozen=True, slots=True)
class Broadcast:
    """All devices along the axis hold the same: the whole tensor, or equal shards of it.

    >>> Broadcast()
    B
    """

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "B"

    def _repr_html_(self) -> str:
        return signature_html("B", "all devices along this axis hold the same")


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device along the axis holds a tensor of full shape; reducing them by `op` gives the value.

    `P` is `Partial("sum")`; calling it makes the others.

    >>> P, P("max")
    (P, P(max))
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in PARTIAL_OPS:
            raise SignatureError(
                Problem(
                    kind="signature",
                    where="P(...)",
                    got=f"P({self.op!r})",
                    legal=LEGAL_PARTIALS,
                    why="P is the Partial signature: shards that reduce to the tensor",
                    fix=(
                        f"did you mean jax.sharding.PartitionSpec({self.op!r})? It is accepted in in_sbp"
                        if isinstance(self.op, str)
                        else "name the reduction"
                    ),
                )
            )

    def __call__(self, *ops: object) -> Partial:
        if len(ops) == 1 and isinstance(ops[0], str):
            return Partial(ops[0])
        given = ", ".join(map(repr, ops))
        raise SignatureError(
            Problem(
                kind="signature",
                where="P(...)",
                got=f"P({given})",
                legal=LEGAL_PARTIALS,
                why="P is the Partial signature: shards that reduce to the tensor",
                fix=f"did you mean jax.sharding.PartitionSpec({given})? It is accepted in in_sbp",
            )
        )

    def __repr__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"

    def _repr_html_(self) -> str:
        return signature_html(repr(self), f"the {self.op} over the devices along this axis is the tensor")


Signature: TypeAlias = Split | AutoSplit | Broadcast | Partial
NdSbp: TypeAlias = tuple[Signature, ...]

S = Split
B = Broadcast()
P = Partial("sum")


_TOKEN = re.compile(
    r"\s*(?:S\(\s*(-?\d+)\s*\)|S(\d+)|S\((AUTO)\)|(B)|P\(\s*\"?'?(\w+)'?\"?\s*\)|(P))\s*(?:,|$)"
)


def is_signature(x: object) -> bool:
    """Whether `x` is one 1-D signature."""
    return isinstance(x, Split | AutoSplit | Broadcast | Partial)


def format_sbp(nd: Iterable[Signature]) -> str:
    """Prints an N-D signature as the user would write it.

    >>> format_sbp((Split(0), B))
    '[S(0), B]'
    """
    return "[" + ", ".join(map(repr, nd)) + "]"


def parse_sbp(text: str) -> NdSbp:
    """Reads what `format_sbp` prints (and the short form `S0,B`).

    >>> parse_sbp("[S(0), P(max)]")
    (S(0), P(max))
    """
    body = text.strip().removeprefix("[").removesuffix("]")
    out: list[Signature] = []
    at = 0
    while at < len(body):
        m = _TOKEN.match(body, at)
        if not m:
            raise SignatureError(
                Problem(
                    kind="signature",
                    where="a signature in text form",
                    got=repr(text),
                    legal="S(dim), B, P, P(max), P(min), separated by commas",
                    why=f"nothing legal starts at {body[at:]!r}",
                    fix='for example "[S(0), B]"',
                )
            )
        long, short, auto, b, op, _ = m.groups()
        split = AUTO_SPLIT if auto else Split(int(long or short)) if long or short else None
        out.append(split or (B if b else Partial(op or "sum")))
        at = m.end()
    return tuple(out)


def splits_of(nd: Sequence[Signature], dim: int) -> tuple[int, ...]:
    """The placement axes that split `dim`, outer to inner.

    >>> splits_of((Split(0), B, Split(0)), 0)
    (0, 2)
    """
    return tuple(axis for axis, s in enumerate(nd) if isinstance(s, Split) and s.dim == dim)


def has_partial(nd: Iterable[Signature]) -> bool:
    """Whether any axis of the signature is Partial."""
    return any(isinstance(s, Partial) for s in nd)


def normalise(nd: Iterable[Signature], ndim: int) -> NdSbp:
    """Counts negative split dims from the end.

    >>> normalise((Split(-1), B), 3)
    (S(2), B)
    """
    return tuple(Split(s.dim + ndim) if isinstance(s, Split) and -ndim <= s.dim < 0 else s for s in nd)
