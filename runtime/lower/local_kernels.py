"""Runs the body of an op on the shards of one device, and checks its results while it is traced."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from sbp.communication.joint import Sending, results_of, run_together
from sbp.communication.protocol import Context
from sbp.compat.untyped import DType, PyTree
from sbp.errors import Problem, raise_all
from sbp.passes.program.graph import Node
from sbp.passes.program.views import at_line, declared_communication
from sbp.signature import format_sbp


@dataclass(frozen=True)
class LocalOp:
    """An op on the shards of one device.

    Arguments:
      node: the op.
      ctx: the layouts, and the way to other devices; it notes what the body sends.
      operands: the shards; None for what is not needed of them.
      dtypes: of the results.
      keys: which keys it sends to the owners of rows; None if it sends none.
    """

    node: Node
    ctx: Context
    operands: Sequence[Any]
    dtypes: Sequence[DType]
    keys: Hashable | None = None

    def begin(self) -> Sequence[jax.Array] | Sending[list[jax.Array]]:
        """What the body returns."""
        own = self.node.rule.body if self.node.rule is not None else None
        return self.ctx.bind(*self.operands) if own is None else own(self.ctx, *self.operands)

    def send(self) -> Sending[PyTree]:
        """The part of the body that sends the keys."""
        assert self.node.rule is not None and self.node.rule.keys is not None
        return self.node.rule.keys(self.ctx, *self.operands)

    def with_keys(self, sent: Mapping[Hashable, PyTree]) -> LocalOp:
        """The same with its keys, if they are sent already."""
        known = None if self.keys is None else sent.get(self.keys)
        return self if known is None else replace(self, ctx=replace(self.ctx, keys=known))


def run_bodies(ops: Sequence[LocalOp]) -> list[Sequence[jax.Array]]:
    """The results of ops, of which none waits for another; what they send at one time goes as one message.

    Raises:
      RuleError: if a body does not return a shard of every result, or sends what the rule does not declare.
    """
    results = results_of([op.begin() for op in ops])
    for op, made in zip(ops, results, strict=True):
        found = [
            *_result_problems(op.node, op.ctx, made, op.dtypes),
            *undeclared_collectives(op.node, op.ctx),
        ]
        raise_all(at_line(p, op.node) for p in found)
    return results


def send_keys(ops: Iterable[LocalOp]) -> dict[Hashable, PyTree]:
    """What comes of the keys of some ops, which go as one message; equal ones once."""
    some = dict[Hashable, LocalOp]()
    for op in ops:
        if op.keys is not None:
            some.setdefault(op.keys, op)
    return dict(zip(some, run_together([op.send() for op in some.values()]), strict=True))


def _result_problems(node: Node, ctx: Context, results: object, dtypes: Sequence[DType]) -> Iterator[Problem]:
    where, legal = f"the body of {node.op!r}", f"a list of {_count(len(dtypes), 'array')}"
    if not isinstance(results, list | tuple):
        fix = "return [y]" if len(dtypes) == 1 else "return one array per result, in their order"
        why = "an op may have several results, so a body always returns a list"
        yield Problem("rule", where, _text(results), legal, why, fix)
        return
    if len(results) != len(dtypes):
        why, fix = "a body returns a shard of every result", "return one array per result, in their order"
        yield Problem("rule", where, f"a list of {_count(len(results), 'array')}", legal, why, fix)
        return
    for i, (x, layout, dtype) in enumerate(zip(results, ctx.results, dtypes, strict=True)):
        if getattr(x, "shape", None) == layout.local and getattr(x, "dtype", None) == dtype:
            continue
        devices = " x ".join(map(str, layout.hierarchy))
        why = f"{dtype}{list(layout.shape)} has the signature {format_sbp(layout.nd)} on {devices} devices"
        fix = f"ctx.results[{i}].local is the shape of a shard, padding included"
        if node.rule is None or node.rule.body is None:
            fix = "body=: a body of its own, with the parameters of a shard (ctx.bind(*args, shape=...))"
        elif getattr(x, "shape", None) == layout.local:
            fix = f"y.astype({str(dtype)!r})"
        yield Problem("rule", f"{where}, result {i}", _text(x), f"{dtype}{list(layout.local)}", why, fix)


def undeclared_collectives(node: Node, ctx: Context) -> Iterator[Problem]:
    """Collectives that the body runs and the rule does not declare.

    Of rounds whose number depends on data the first is declared. The reductions by which devices agree on
    another round are allowed along axes on which anything is declared.
    """
    layouts = (*ctx.operands, *ctx.results)
    # Devices of which there is one send nothing.
    sizes = layouts[0].hierarchy if layouts else ()
    said = {(kind, a) for kind, axes in ctx.collectives or () for a in axes if sizes[a] > 1}
    if not said:
        return
    known = {(t.kind, a) for t in declared_communication(node, ctx) for a in t.axes}
    unknown = said - known - {("all_reduce", a) for _, a in known}
    for kind in sorted({kind for kind, _ in unknown}):
        over = " and ".join(repr(ctx.names[a]) for k, a in sorted(unknown) if k == kind)
        told = ", ".join(f"{k} over {ctx.names[a]!r}" for k, a in sorted(known))
        legal = told or "none: the rule declares nothing"
        why = "the plan would neither show nor price it"
        fix = (
            f"communication=: a function of the same Context, yielding sbp.rules.Communication({kind!r}, ...)"
        )
        yield Problem("rule", f"the body of {node.op!r}", f"{kind} over {over}", legal, why, fix)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _text(x: object) -> str:
    """An array as its type, anything else as it is."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    return f"a {type(x).__name__}"
