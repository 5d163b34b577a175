"""What an entry of the registry says: the rows of an op, its body, its work, and what the body sends.

Words: docs/glossary.md.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from sbp.communication.joint import Sending
from sbp.communication.protocol import Communication, Context
from sbp.compat import core
from sbp.compat.untyped import DType, PyTree
from sbp.signature import B, P, Signature

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One application of a primitive, as ONE placement axis sees it.

    Arguments:
      name: the primitive's name.
      shapes, results: shapes of operands and results, on what the outer axes left.
      dtypes, result_dtypes: their dtypes.
      params: the primitive's parameters, with logical shapes.
      group: the size of the axis.
      logical: shapes of the operands before any split.
    """

    name: str
    shapes: tuple[Shape, ...]
    results: tuple[Shape, ...]
    dtypes: tuple[DType, ...]
    result_dtypes: tuple[DType, ...]
    params: Mapping[str, Any] = field(hash=False)
    group: int
    logical: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One valid 1-D signature of an op.

    Arguments:
      operands, results: a signature each.
      fills: operands that may come as a whole value on one device and zeros on the others, B -> P without a
        word: for example the bias in `partial + bias`. Only additive ops may see such zeros, since zero times
        infinity is NaN. (A P(max) or P(min) would need no zeros: a whole value is the extremum of its copies;
        the planner does not make use of that yet.)
      reason: why the results are partial, if they become so here.
      moves: whether results are made of the operands' elements, with no arithmetic: then a P passes bit for
        bit. What computes with the parts of a sum need not give what the sum gives: with a factor that is
        infinite, parts of both signs, or zeros among them, give NaN (docs/decisions/0004).
      multiplies: whether the parts of a sum are multiplied by another operand, which may be infinite.
      owned: whether one device has an element of a P result, and the others zeros.
      finite_only: whether it gives what one device gives only where the operands are finite. An FFT is one:
        which of its intermediate zeros meet an infinity, and so where NaN comes out, depends on the shape
        that the library is given.
    """

    operands: tuple[Signature, ...]
    results: tuple[Signature, ...]
    fills: tuple[int, ...] = ()
    reason: str = ""
    moves: bool = False
    multiplies: bool = False
    owned: bool = False
    finite_only: bool = False

    def needs_finite(self, op: Op) -> bool:
        """Whether infinities, NaN and the signs of zeros may come out otherwise than on one device."""
        wanted = zip(self.operands, op.dtypes, strict=True)
        parts = any(s == P and jnp.issubdtype(t, jnp.inexact) for s, t in wanted)
        return self.finite_only or (parts and not self.moves)


@dataclass(frozen=True, slots=True)
class Matmul:
    """The products of matrices that an op computes, of [m, k] by [k, n].

    Arguments:
      batch: how many there are.
      dtypes: of both operands, which decide at what rate a device computes it.
      exact: whether float32 must keep all bits: matrix units cut them where no precision is asked for.
      fused: whether they follow each other in one kernel, one's result an operand of the next.
    """

    batch: int
    m: int
    n: int
    k: int
    dtypes: tuple[DType, ...]
    exact: bool = False
    fused: bool = False

    @property
    def flops(self) -> float:
        """A multiplication and an addition per step of each product."""
        return 2.0 * self.batch * self.m * self.n * self.k


Rows: TypeAlias = Callable[[Op], Iterable[Row]]
OpBody: TypeAlias = Callable[..., Sequence[jax.Array] | Sending[list[jax.Array]]]
Keys: TypeAlias = Callable[..., Sending[PyTree]]
Flops: TypeAlias = Callable[[Op], float]
Traffic: TypeAlias = Callable[[Op], float]
Matmuls: TypeAlias = Callable[[Op], Matmul]
RowIds: TypeAlias = Callable[[Mapping[str, Any], int], Sequence[int]]
Talks: TypeAlias = Callable[[Context], Iterable[Communication]]
Held: TypeAlias = Callable[[Context], float]
WhyWhole: TypeAlias = Callable[[Mapping[str, Any]], str]


def element_flops(op: Op) -> float:
    """One operation per element of the results."""
    return float(sum(math.prod(s) for s in op.results))


def element_traffic(op: Op) -> float:
    """Every operand read once, every result written once; scalars are free."""
    shapes, dtypes = (*op.shapes, *op.results), (*op.dtypes, *op.result_dtypes)
    return sum(math.prod(s) * core.itemsize(d) for s, d in zip(shapes, dtypes, strict=True) if s)


def row_traffic(rows: int | None = None) -> Traffic:
    """Of an op that reads some rows of operand 0, or changes some in place: the others stay untouched.

    Arguments:
      rows: the operand that has the rows; the first result if None.
    """

    def traffic(op: Op) -> float:
        moved = op.results[0] if rows is None else op.shapes[rows]
        others = zip(op.shapes[1:], op.dtypes[1:], strict=True)
        table = 2 * math.prod(moved) * core.itemsize(op.dtypes[0])
        return table + sum(math.prod(s) * core.itemsize(d) for s, d in others if s)

    return traffic


@dataclass(frozen=True, slots=True)
class Rule:
    """What one op does to signatures.

    Arguments:
      name: the primitive's name.
      rows: the valid 1-D signatures of an application; all B is always valid and need not be listed.
      body: the body that runs on the shards; None binds the same primitive to them. It may be a generator
        of what it sends (sbp/communication/joint.py).
      keys: the part of the body that sends keys to the owners of rows, given the operands; what it returns is
        `Context.keys` of the body then. Ops that have one send together.
      flops: of an application with local shapes.
      traffic: bytes that it reads and writes, with local shapes.
      matmul: the products of matrices that it computes, if its work is that; other work runs on vector units.
      fused: whether compilers merge it into its neighbours' loops, so that its memory traffic is small.
      pointwise: whether an element of a result is computed from those at its place alone.
      identity: whether the first result is the first operand as it is.
      layout: whether it moves or converts elements only, where it keeps their number: a tensor keeps its name
        through it.
      communication: the collectives inside the body, given the layouts; None if there are none.
      body_bytes: bytes that a device holds inside the body beside operands and results, given the layouts;
        None if that is little.
      ids: given its parameters and how many operands it has, the positions of those that are ids of rows of a
        table; the capacity of its exchange is planned from a batch of them. None for an op without such.
      functions: the parameters that hold functions and that the rows account for. An application that holds
        a function elsewhere runs whole: nothing is known of what it computes.
      whole: given its parameters, why an application cannot be split, for the plan; "" if it can. None for an
        op of which every application can.
      family: the file it stands in, for the table in the docs.
      note: a remark for the table.
      function: of the user's, if the op is a call of one.
    """

    name: str
    rows: Rows
    body: OpBody | None = None
    keys: Keys | None = None
    flops: Flops = element_flops
    matmul: Matmuls | None = None
    fused: bool = False
    pointwise: bool = False
    identity: bool = False
    layout: bool = False
    communication: Talks | None = None
    body_bytes: Held | None = None
    traffic: Traffic = element_traffic
    ids: RowIds | None = None
    functions: tuple[str, ...] = ()
    whole: WhyWhole | None = None
    family: str = ""
    note: str = ""
    function: Callable[..., PyTree] | None = None


def all_broadcast(op: Op) -> Row:
    """The row that every op has."""
    return Row((B,) * len(op.shapes), (B,) * len(op.results))
