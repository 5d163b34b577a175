"""The registry of rules: what an entry says, and how entries are added and found."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from sbp import compat
from sbp.errors import Problem, RuleError
from sbp.rules.local import Local
from sbp.signature import B, P, Partial, Signature

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
    dtypes: tuple[Any, ...]
    result_dtypes: tuple[Any, ...]
    params: Mapping[str, Any] = field(hash=False)
    group: int
    logical: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One valid 1-D signature of an op.

    Arguments:
      operands, results: a signature each.
      fills: operands whose P may be made from a whole value by filling the other devices with zeros. Only
        additive ops may see such zeros: zero times infinity is NaN. A P(max) or P(min) needs no zeros: a
        whole value is the extremum of its copies; the planner does not make use of that yet.
      reason: why the results are partial, if they become so here.
      moves: whether results are made of the operands' elements, with no arithmetic: then a P passes bit for
        bit. What computes with the parts of a sum need not give what the sum gives: with a factor that is
        infinite, parts of both signs, or zeros among them, give NaN (docs/decisions/0004).
      multiplies: whether the parts of a sum are multiplied by another operand, which may be infinite.
      owned: whether one device has an element of a P result, and the others zeros.
      finite_only: whether it gives what one device gives only where the operands are finite: how many of its
        zeros a library multiplies, or where it puts NaN, depends on the shape that it is given.
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
class Talk:
    """A collective inside the body of an op, beyond what its operands' and results' signatures say.

    Arguments:
      kind: as of any collective: "permute" for a halo, "all_gather" for a carry.
      axes: the placement axes that take part, outer to inner.
      wire_bytes: what one device sends.
      operand: the operand that it is about.
      reason: one sentence; `{axes}` stands for their names.
      sent: what of the operand's shards is sent, if that is all there is to it: ops that send the same share
        one collective. None if the op has computed what it sends.
    """

    kind: str
    axes: tuple[int, ...]
    wire_bytes: float
    operand: int
    reason: str
    sent: Hashable = None


Rows: TypeAlias = Callable[[Op], Iterable[Row]]
Body: TypeAlias = Callable[..., Any]
Flops: TypeAlias = Callable[[Op], float]
Traffic: TypeAlias = Callable[[Op], float]
Talks: TypeAlias = Callable[[Local], Iterable[Talk]]


def element_flops(op: Op) -> float:
    """One operation per element of the results."""
    return float(sum(math.prod(s) for s in op.results))


def element_traffic(op: Op) -> float:
    """Every operand read once, every result written once; scalars are free."""
    shapes, dtypes = (*op.shapes, *op.results), (*op.dtypes, *op.result_dtypes)
    return sum(math.prod(s) * compat.itemsize(d) for s, d in zip(shapes, dtypes, strict=True) if s)


def row_traffic(rows: int | None = None) -> Traffic:
    """Of an op that reads some rows of operand 0, or changes some in place: the others stay untouched.

    Arguments:
      rows: the operand that has the rows; the first result if None.
    """

    def traffic(op: Op) -> float:
        moved = op.results[0] if rows is None else op.shapes[rows]
        others = zip(op.shapes[1:], op.dtypes[1:], strict=True)
        table = 2 * math.prod(moved) * compat.itemsize(op.dtypes[0])
        return table + sum(math.prod(s) * compat.itemsize(d) for s, d in others if s)

    return traffic


@dataclass(frozen=True, slots=True)
class Rule:
    """What one op does to signatures.

    Arguments:
      name: the primitive's name.
      rows: the valid 1-D signatures of an application; all B is always valid and need not be listed.
      local: the body that runs on the shards; None binds the same primitive to them.
      flops: of an application with local shapes.
      traffic: bytes that it reads and writes, with local shapes.
      fused: whether compilers merge it into its neighbours' loops, so that its memory traffic is small.
      talks: the collectives inside the body, given the layouts; None if there are none.
      functions: the parameters that hold functions and that the rows account for. An application that holds
        a function elsewhere runs whole: nothing is known of what it computes.
      family: the file it stands in, for the table in the docs.
      note: a remark for the table.
      function: of the user's, if the op is a call of one.
    """

    name: str
    rows: Rows
    local: Body | None = None
    flops: Flops = element_flops
    fused: bool = False
    talks: Talks | None = None
    traffic: Traffic = element_traffic
    functions: tuple[str, ...] = ()
    family: str = ""
    note: str = ""
    function: Any = None


class Registry(UserDict[str, Rule]):
    """Rules by name; `version` grows with every change: what was planned before may be old."""

    version = 0

    def __setitem__(self, name: str, entry: Rule) -> None:
        super().__setitem__(name, entry)
        self.version += 1

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.version += 1


REGISTRY = Registry()
USER = "user"
"""The family of the rules that users register."""


def all_broadcast(op: Op) -> Row:
    """The row that every op has."""
    return Row((B,) * len(op.shapes), (B,) * len(op.results))


def valid_rows(rule: Rule | None, op: Op) -> tuple[Row, ...]:
    """Every valid 1-D signature of an application: the rule's rows that the dtypes allow, and all B.

    Raises:
      RuleError: if a row does not have one signature per operand and result.
    """
    rows = [] if rule is None or unknown_functions(rule, op.params) else list(rule.rows(op))
    for row in rows:
        if len(row.operands) != len(op.shapes) or len(row.results) != len(op.results):
            raise _bad_row(op, row, "a row has one signature per operand and per result")
    legal = [r for r in rows if not _partial_of_unsummable(op, r)]
    return tuple(dict.fromkeys([*legal, all_broadcast(op)]))


def unknown_functions(rule: Rule, params: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters that hold a function which the rows do not account for.

    A rule that a user registered accounts for all: its op is the call of a function.
    """
    if rule.family == USER:
        return ()
    return tuple(k for k, v in params.items() if k not in rule.functions and compat.holds_function(v))


def _partial_of_unsummable(op: Op, row: Row) -> bool:
    """Whether keys or booleans would be partial, or complex numbers, which have no order, a maximum."""

    def bad(s: Partial, dtype: Any) -> bool:
        ordered = s.op == "sum" or not jnp.issubdtype(dtype, jnp.complexfloating)
        return compat.is_key(dtype) or dtype == bool or not ordered

    both = zip((*row.operands, *row.results), (*op.dtypes, *op.result_dtypes), strict=True)
    return any(isinstance(s, Partial) and bad(s, d) for s, d in both)


def _bad_row(op: Op, row: Row, why: str) -> RuleError:
    return RuleError(
        Problem(
            "rule",
            f"the rule of {op.name!r}",
            f"{row.operands} -> {row.results}",
            f"{len(op.shapes)} operands -> {len(op.results)} results",
            why,
            "see the table of ops for examples",
        )
    )


def lookup(name: str) -> Rule | None:
    """The rule of a primitive, if it has one."""
    return REGISTRY.get(name)


def rule(
    *names: str,
    local: Body | None = None,
    flops: Flops = element_flops,
    fused: bool = False,
    talks: Talks | None = None,
    traffic: Traffic = element_traffic,
    functions: tuple[str, ...] = (),
    note: str = "",
) -> Callable[[Rows], Rows]:
    """Enters the decorated function as the rule of `names`; the built-in families use it."""

    def enter(rows: Rows) -> Rows:
        family = rows.__module__.rsplit(".", 1)[-1]
        for name in names:
            _add(Rule(name, rows, local, flops, fused, talks, traffic, functions, family, note))
        return rows

    return enter


def _add(entry: Rule, replace: bool = False) -> None:
    if entry.name in REGISTRY and not replace:
        raise RuleError(
            Problem(
                "rule",
                f"register_rule({entry.name!r})",
                "a second rule",
                "one rule per op",
                f"{entry.name!r} already has a rule in {REGISTRY[entry.name].family!r}",
                "replace=True, if you mean to replace it",
            )
        )
    REGISTRY[entry.name] = entry


def register_rule(
    op: Any,
    rows: Rows | str,
    *,
    reduced: Mapping[str, str] | None = None,
    linear: Iterable[int] = (),
    local: Body | None = None,
    flops: Flops = element_flops,
    talks: Talks | None = None,
    replace: bool = False,
) -> None:
    """Teaches the compiler an op of yours.

    Arguments:
      op: a primitive or its name; a `jax.custom_vjp` or `jax.custom_jvp` function, which then is one op;
        "pallas_call[name]" or "ffi_call[target]" for a kernel.
      rows: a function from `Op` to rows, or factors such as "b k, k n -> b n" (one letter per dim; `_` for
        a dim that must be whole).
      reduced: with factors: the letters that a reduction removes, and by what: {"k": "sum"}.
      linear: with factors: the operands in which the op is linear.
      local: the body that runs on the shards; None binds the primitive to them, or calls the function, with
        zeros for the padding of letters that are summed up. That is right where the op is linear in an
        operand that has the letter; other reduced letters are then split only where they divide.
      flops: of an application with local shapes.
      talks: the collectives that `local` runs itself, for the plan and its costs.
      replace: whether an existing rule may be replaced.

    Raises:
      RuleError: if the op has a rule already, or is a function that leaves no trace of itself.

    >>> register_rule("my_scale", "a b, b -> a b", linear=(0, 1))
    >>> lookup("my_scale").family
    'user'
    >>> del REGISTRY["my_scale"]
    """
    from sbp.rules.factors import Spec

    call = compat.custom_call(op)
    name = op if isinstance(op, str) else call or getattr(op, "name", None)
    if not isinstance(name, str):
        raise _no_op(op)
    function = op if call is not None else None
    if isinstance(rows, str):
        spec = Spec(rows, dict(reduced or {}), tuple(linear), local is not None)
        rows, local = spec.rows, local or _body(function, spec.masked)
    entry = Rule(name, rows, local or _body(function), flops, talks=talks, family=USER, function=function)
    _add(entry, replace)


def _body(function: Any, masked: Callable[..., list[Any]] | None = None) -> Body | None:
    """The body of an op that has none of its own: it, or the function that it is a call of, on the shards."""
    if function is None and masked is None:
        return None

    def body(ctx: Local, *args: Any) -> list[Any]:
        shards = args if masked is None else masked(ctx, *args)
        return ctx.bind(*shards) if function is None else jax.tree.leaves(function(*shards))

    return body


def _no_op(op: Any) -> RuleError:
    return RuleError(
        Problem(
            "rule",
            f"register_rule({getattr(op, '__name__', op)!r})",
            f"a {type(op).__name__}",
            "a primitive, its name, a jax.custom_vjp or jax.custom_jvp function",
            "what JAX traces of any other function is its ops; nothing says where it began",
            "jax.custom_vjp around it, or the name of its kernel: 'pallas_call[name]', 'ffi_call[target]'",
        )
    )


__all__ = ["REGISTRY", "Local", "Op", "Row", "Rule", "Talk", "lookup", "register_rule", "rule", "valid_rows"]
