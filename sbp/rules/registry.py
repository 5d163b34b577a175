"""The registry of rules: adds, checks and finds entries."""

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sbp.communication.protocol import Context
from sbp.compat import core
from sbp.compat.core import Primitive
from sbp.compat.untyped import DType, PyTree
from sbp.errors import Problem, RuleError, raise_all
from sbp.rules.checks import checked_rows, text_problems
from sbp.rules.entry import (
    Flops,
    Held,
    Keys,
    Matmuls,
    Op,
    OpBody,
    Row,
    RowIds,
    Rows,
    Rule,
    Talks,
    Traffic,
    WhyWhole,
    all_broadcast,
    element_flops,
    element_traffic,
)
from sbp.rules.factors import Spec
from sbp.signature import Partial, Split


class Registry(UserDict[str, Rule]):
    """Rules by name. `version` grows with every change, so that plans made before can be told apart."""

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


def valid_rows(rule: Rule | None, op: Op) -> tuple[Row, ...]:
    """Every valid 1-D signature of an application: the rule's rows that the dtypes allow, and all B.

    A dim of size 1 or 0 is never split.

    Raises:
      RuleError: if a row of the rule does not match the op.
    """
    rows = [] if rule is None or unknown_functions(rule, op.params) else checked_rows(op, rule.rows(op))
    legal = [r for r in rows if not _partial_of_unsummable(op, r) and _splits_many(op, r)]
    return tuple(dict.fromkeys([*legal, all_broadcast(op)]))


def unknown_functions(rule: Rule, params: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters that hold a function which the rows do not describe.

    A rule that a user registered describes all of them: its op is the call of a function.
    """
    if rule.family == USER:
        return ()
    return tuple(k for k, v in params.items() if k not in rule.functions and core.holds_function(v))


def _partial_of_unsummable(op: Op, row: Row) -> bool:
    """Whether keys would be partial, booleans a sum or a product, or complex numbers anything but a sum: they
    have no order, and NCCL does not multiply them."""

    def bad(s: Partial, dtype: DType) -> bool:
        if dtype == bool:
            return s.op in ("sum", "prod")
        return core.is_key(dtype) or (s.op != "sum" and jnp.issubdtype(dtype, jnp.complexfloating))

    both = zip((*row.operands, *row.results), (*op.dtypes, *op.result_dtypes), strict=True)
    return any(isinstance(s, Partial) and bad(s, d) for s, d in both)


def _splits_many(op: Op, row: Row) -> bool:
    """Whether every dim that the row splits has two elements or more."""
    both = zip(row.operands + row.results, op.shapes + op.results, strict=True)
    return all(shape[s.dim] > 1 for s, shape in both if isinstance(s, Split))


def lookup(name: str) -> Rule | None:
    """The rule of a primitive, if it has one."""
    return REGISTRY.get(name)


def rule(
    *names: str,
    body: OpBody | None = None,
    keys: Keys | None = None,
    flops: Flops | None = None,
    matmul: Matmuls | None = None,
    fused: bool = False,
    pointwise: bool = False,
    identity: bool = False,
    layout: bool = False,
    communication: Talks | None = None,
    body_bytes: Held | None = None,
    traffic: Traffic = element_traffic,
    ids: RowIds | None = None,
    functions: tuple[str, ...] = (),
    whole: WhyWhole | None = None,
    note: str = "",
) -> Callable[[Rows], Rows]:
    """Registers the decorated function as the rule of `names`; for the built-in families."""

    def enter(rows: Rows) -> Rows:
        family = rows.__module__.rsplit(".", 1)[-1]
        for name in names:
            _add(
                Rule(
                    name=name,
                    rows=rows,
                    body=body,
                    keys=keys,
                    flops=flops or _flops_of(matmul),
                    matmul=matmul,
                    fused=fused,
                    pointwise=pointwise,
                    identity=identity,
                    layout=layout,
                    communication=communication,
                    body_bytes=body_bytes,
                    traffic=traffic,
                    ids=ids,
                    functions=functions,
                    whole=whole,
                    family=family,
                    note=note,
                )
            )
        return rows

    return enter


def _flops_of(matmul: Matmuls | None) -> Flops:
    """The work of an op that says no more: of its products, else an operation per element."""
    return element_flops if matmul is None else lambda op: matmul(op).flops


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
    op: str | Primitive | Callable[..., PyTree],
    rows: Rows | str,
    *,
    reduced: Mapping[str, str] | None = None,
    linear: Iterable[int] = (),
    body: OpBody | None = None,
    flops: Flops | None = None,
    matmul: Matmuls | None = None,
    traffic: Traffic = element_traffic,
    body_bytes: Held | None = None,
    communication: Talks | None = None,
    replace: bool = False,
) -> None:
    """Teaches the compiler how one of your ops can be split.

    Arguments:
      op: a primitive or its name; a `jax.custom_vjp` or `jax.custom_jvp` function, which then counts as one
        op; "pallas_call[name]" or "ffi_call[target]" for a kernel.
      rows: a function from `Op` to rows, or factors such as "b k, k n -> b n": one letter per dim, and `_`
        for a dim that is never split.
      reduced: with factors: the letters that the op reduces, and how: {"k": "sum"}.
      linear: with factors: the positions of the operands in which the op is linear.
      body: the function that runs on the shards. Without it, the primitive or function itself runs on
        them, and padding of summed letters is zero. That is right where the op is linear in an operand that
        has the letter; other reduced letters are then split only where they divide evenly.
      flops: a function from the application, with local shapes; default: those of `matmul`, or one per
        element.
      matmul: the matrix products inside the op, as `sbp.rules.Matmul`, so that the plan uses their rate.
      traffic: bytes that the op reads and writes, with local shapes; default: every operand and result once.
      body_bytes: that the op holds on a device beside its operands and results, given a `Context`.
      communication: the collectives that `body` runs itself, so that the plan counts them.
      replace: replace an existing rule.

    Raises:
      RuleError: if the op has a rule already, if it is a function that JAX inlines in a trace, or if the
        letters contradict each other or the op.

    >>> register_rule("my_scale", "a b, b -> a b", linear=(0, 1))
    >>> lookup("my_scale").family
    'user'
    >>> del REGISTRY["my_scale"]
    """
    call = core.custom_call(op) if callable(op) else None
    name = op if isinstance(op, str) else call or getattr(op, "name", None)
    if not isinstance(name, str):
        raise _no_op(op)
    function = op if callable(op) and call is not None else None
    if isinstance(rows, str):
        reduced, linear = dict(reduced or {}), tuple(linear)
        raise_all(text_problems(name, rows, reduced, linear, body is not None))
        spec = Spec(rows, reduced, linear, body is not None)
        rows, body = spec.rows, body or _body(function, spec.mask_shards)
    entry = Rule(
        name,
        rows,
        body or _body(function),
        flops=flops or _flops_of(matmul),
        matmul=matmul,
        traffic=traffic,
        body_bytes=body_bytes,
        communication=communication,
        family=USER,
        function=function,
    )
    _add(entry, replace)


def _body(function: Callable[..., PyTree] | None, masked: OpBody | None = None) -> OpBody | None:
    """The body of an op that has none of its own: it, or the function that it is a call of, on the shards."""
    if function is None and masked is None:
        return None

    def body(ctx: Context, *args: jax.Array) -> list[jax.Array]:
        shards = args if masked is None else masked(ctx, *args)
        return ctx.bind(*shards) if function is None else jax.tree.leaves(function(*shards))

    return body


def _no_op(op: object) -> RuleError:
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
