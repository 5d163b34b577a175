"""A jaxpr as the printer wants it: calls inlined, nothing unused, loops with what they close over.

Operations that change nothing, and numbers that can be worked out, are not said.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from sbp.compat import core
from sbp.compat.untyped import DType
from sbp.runtime.source.tracing import IS, step_of
from sbp.runtime.source.values import Block, Eqn, Lit, Term, Var

IDENTITIES = ("stop_gradient", "pvary", "pbroadcast", "name", "sbp_annotate", "sbp_cotangent")
"""Primitives that give what they take, where nobody takes a derivative, and what is asked has been done."""


@dataclass
class Peephole:
    """Looks at equations one by one, as they are made.

    Arguments:
      reshape_of: what arrays are a reshape of.
    """

    reshape_of: dict[Var, Term] = field(default_factory=dict)

    def simpler(self, eqn: Eqn) -> Eqn | Term:
        """The equation, a simpler one, or what it gives if that is there already.

        Every result is the same number: what XLA, too, leaves out.
        """
        (x, *rest), (out, *more) = eqn.ins or (None,), eqn.outs or (None,)
        if x is None or rest or out is None or more or eqn.blocks:
            return eqn
        if eqn.name == "convert_element_type" and isinstance(x, Lit) and _plain(x.dtype, out.dtype):
            return Lit(np.asarray(x.value).astype(out.dtype)[()], out.dtype)
        if eqn.name == "broadcast_in_dim" and isinstance(x, Var):
            return self._spread(eqn, x)
        if eqn.name == "reshape" and eqn.params.get("dimensions") is None:
            return self._reshape(eqn, x)
        return eqn

    def _spread(self, eqn: Eqn, x: Var) -> Eqn | Term:
        """What is spread over dims of size 1 that a reshape has taken away."""
        (out,) = eqn.outs
        first, dims = self.reshape_of.get(x, x), tuple(eqn.params["broadcast_dimensions"])
        kept = [1] * len(out.shape)
        for d, size in zip(dims, x.shape, strict=True):
            kept[d] = size
        if math.prod(x.shape) == math.prod(out.shape):
            self.reshape_of[out] = first
        if first is x or first.shape != tuple(kept):
            return eqn
        if first.shape == out.shape:
            return first
        params = {**eqn.params, "broadcast_dimensions": tuple(range(len(kept)))}
        return replace(eqn, params=params, ins=(first,))

    def _reshape(self, eqn: Eqn, x: Term) -> Eqn | Term:
        """A reshape, of what the operand is a reshape of."""
        (out,) = eqn.outs
        first = self.reshape_of.get(x, x) if isinstance(x, Var) else x
        if first.shape == out.shape:
            return first
        self.reshape_of[out] = first
        return replace(eqn, ins=(first,))


def _plain(*dtypes: DType) -> bool:
    """Whether NumPy and XLA convert numbers of such types alike: small whole numbers of any, and floats."""
    return all(d == np.bool_ or np.issubdtype(d, np.integer) or np.issubdtype(d, np.floating) for d in dtypes)


@dataclass
class BlockBuilder:
    """Makes blocks of jaxprs.

    Arguments:
      constants: arrays that stand in the program, by the variable that stands for each.
      steps: of values that are made together, the step of each.
      annotated, scoped: whether annotations, and scopes, are kept, as in a program that its user has written.
    """

    constants: dict[Var, Any] = field(default_factory=dict)
    fresh: Iterator[int] = field(default_factory=itertools.count)
    steps: dict[int, int] = field(default_factory=dict)
    peephole: Peephole = field(default_factory=Peephole)
    annotated: bool = False
    scoped: bool = False

    def _scope(self, eqn: core.JaxprEqn) -> str:
        """The names around an equation, that of its step aside."""
        return re.sub(r"/?sbp\.step\d+", "", core.scope_of(eqn.source_info))

    def var(self, aval: core.Aval) -> Var:
        """A new variable."""
        return Var(next(self.fresh), tuple(aval.shape), aval.dtype)

    def constant(self, value: Any) -> Term:
        """An array of the program: a scalar stands where it is used."""
        array = value if core.is_key(value.dtype) else np.asarray(value)
        if not array.shape and not core.is_key(array.dtype):
            return Lit(array[()], array.dtype)
        var = Var(next(self.fresh), tuple(array.shape), array.dtype)
        self.constants[var] = array
        return var

    def block(
        self, jaxpr: core.Jaxpr, given: Sequence[Term | None], consts: Sequence[Any], step: int = -1
    ) -> Block:
        """The block of a jaxpr.

        Arguments:
          given: per input, what it is outside; None for one of the block's own.
          step: of an equation that says none.
        """
        env: dict[Any, Term] = {}
        inputs: list[Var] = []
        for v, outer in zip(jaxpr.invars, given, strict=True):
            if outer is None:
                inputs.append(own := self.var(v.aval))
                env[v] = own
            else:
                env[v] = outer
        for v, value in zip(jaxpr.constvars, consts, strict=True):
            env[v] = self.constant(value) if not isinstance(value, Var | Lit) else value
        eqns: list[Eqn] = []
        kept, outputs = merge_equal(eqns, self._run(jaxpr, env, eqns, step))
        return Block(tuple(inputs), used_equations(kept, outputs), outputs)

    def _run(self, jaxpr: core.Jaxpr, env: dict[Any, Term], eqns: list[Eqn], step: int) -> list[Term]:
        for eqn in jaxpr.eqns:
            self._eqn(eqn, env, eqns, step)
        return [self._read(v, env) for v in jaxpr.outvars]

    def _read(self, v: Any, env: Mapping[Any, Term]) -> Term:
        if not isinstance(v, core.Literal):
            return env[v]
        kind: core.Aval = v.aval
        value = np.asarray(v.val, kind.dtype)
        return Lit(value[()], kind.dtype) if not value.shape else self.constant(value)

    def _eqn(self, eqn: core.JaxprEqn, env: dict[Any, Term], eqns: list[Eqn], outer: int) -> None:
        name, own = eqn.primitive.name, step_of(eqn)
        step = own if own >= 0 else outer
        ins = [self._read(v, env) for v in eqn.invars]
        if name in core.CALLS and core.CALLS[name] in {**eqn.params, "jaxpr": 0}:
            inner, consts = core.sub_jaxpr(eqn.params, core.CALLS[name])
            if len(inner.invars) == len(ins):
                inside = dict(zip(inner.invars, ins, strict=True))
                inside |= {v: self.constant(c) for v, c in zip(inner.constvars, consts, strict=True)}
                env.update(zip(eqn.outvars, self._run(inner, inside, eqns, step), strict=True))
                return
        results: list[core.Aval] = [v.aval for v in eqn.outvars]
        same = len(ins) == len(results) == 1 and ins[0].shape == results[0].shape
        passed = name in IDENTITIES and not (self.annotated and name == "sbp_annotate")
        if same and (passed or (name == "convert_element_type" and _keeps(eqn, ins[0]))):
            env[eqn.outvars[0]] = ins[0]
            return
        if name == "sbp_named_call" and eqn.params["call"].function == IS:
            env[eqn.outvars[0]] = ins[0]
            if isinstance(ins[0], Var):
                self.steps[ins[0].id] = step
            return
        params, blocks, carried = eqn.params, tuple[Block, ...](), 0
        if name in LOOPS:
            params, blocks, ins, carried = LOOPS[name](self, eqn, ins, step)
        outs = tuple(self.var(v.aval) for v in eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
        made = self.peephole.simpler(Eqn(eqn.primitive, params, tuple(ins), outs, step, blocks, carried))
        if isinstance(made, Eqn):
            eqns.append(replace(made, scope=self._scope(eqn)) if self.scoped else made)
        else:
            env[eqn.outvars[0]] = made


def _keeps(eqn: core.JaxprEqn, x: Term) -> bool:
    """Whether a conversion changes nothing: JAX only tells strong types from weak ones by it."""
    return bool(eqn.params["new_dtype"] == x.dtype)


Parts: TypeAlias = tuple[Mapping[str, Any], tuple[Block, ...], list[Term], int]


def _scan(build: BlockBuilder, eqn: core.JaxprEqn, ins: Sequence[Term], step: int) -> Parts:
    closed, params = eqn.params["jaxpr"], eqn.params
    n_consts, n_carry = core.scan_counts(params, len(ins))
    inner = getattr(closed, "jaxpr", closed)
    own = len(inner.invars) - n_consts
    body = build.block(inner, [*ins[:n_consts], *[None] * own], getattr(closed, "consts", ()), step)
    kept: dict[str, Any] = {k: params[k] for k in _SCAN if k in params}
    carried: list[Term] = list(ins[n_consts:])
    return kept, (body,), carried, n_carry


def _while(build: BlockBuilder, eqn: core.JaxprEqn, ins: Sequence[Term], step: int) -> Parts:
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    carried = list(ins[n_cond + n_body :])
    blocks = []
    for key, consts in (("cond_jaxpr", ins[:n_cond]), ("body_jaxpr", ins[n_cond : n_cond + n_body])):
        closed = p[key]
        inner = getattr(closed, "jaxpr", closed)
        blocks.append(
            build.block(inner, [*consts, *[None] * len(carried)], getattr(closed, "consts", ()), step)
        )
    return {}, tuple(blocks), carried, len(carried)


def _cond(build: BlockBuilder, eqn: core.JaxprEqn, ins: Sequence[Term], step: int) -> Parts:
    branches = eqn.params["branches"]
    # Branches close over what they read: they take no arguments of their own.
    blocks = tuple(
        build.block(getattr(b, "jaxpr", b), list(ins[1:]), getattr(b, "consts", ()), step) for b in branches
    )
    return {}, blocks, [ins[0]], 0


_SCAN: tuple[str, ...] = ("length", "reverse", "unroll")
LOOPS: Mapping[str, Any] = {"scan": _scan, "while": _while, "cond": _cond}


def read_counts(block: Block) -> Counter[Var]:
    """How often a block reads each value, those of blocks around it included."""
    found: Counter[Var] = Counter(x for x in block.outputs if isinstance(x, Var))
    for eqn in block.eqns:
        found.update(reads(eqn))
    return found


def reads(eqn: Eqn) -> Iterator[Var]:
    """The values that an equation reads, its blocks included; in a block a value counts twice, so that none
    is computed in every trip that could be computed once."""
    yield from (x for x in eqn.ins if isinstance(x, Var))
    for block in eqn.blocks:
        own = {*block.inputs, *(v for e in block.eqns for v in e.outs)}
        for v in read_counts(block):
            if v not in own:
                yield v
                yield v


def used_equations(eqns: Sequence[Eqn], results: Sequence[Term]) -> tuple[Eqn, ...]:
    """The equations whose results somebody needs."""
    needed = {x for x in results if isinstance(x, Var)}
    kept: list[Eqn] = []
    for eqn in reversed(eqns):
        if eqn.speaks or needed.intersection(eqn.outs):
            kept.append(eqn)
            needed.update(reads(eqn))
    return tuple(reversed(kept))


def merge_equal(eqns: Sequence[Eqn], outputs: Sequence[Term]) -> tuple[tuple[Eqn, ...], tuple[Term, ...]]:
    """Equations of one step that say the same as one: masks, positions."""
    known: dict[Any, Eqn] = {}
    same: dict[Var, Var] = {}
    kept: list[Eqn] = []

    def now(x: Term) -> Term:
        return same.get(x, x) if isinstance(x, Var) else x

    for eqn in eqns:
        eqn = replace(eqn, ins=tuple(map(now, eqn.ins)))
        if not eqn.blocks and not eqn.speaks and not any(map(core.holds_function, eqn.params.values())):
            key = (eqn.step, eqn.name, str(dict(eqn.params)), tuple(map(_key, eqn.ins)))
            first = known.setdefault(key, eqn)
            if first is not eqn and len(first.outs) == len(eqn.outs):
                same.update(zip(eqn.outs, first.outs, strict=True))
                continue
        kept.append(eqn)
    return tuple(kept), tuple(map(now, outputs))


def _key(x: Term) -> Any:
    return x.id if isinstance(x, Var) else (str(x.value), str(x.dtype))
