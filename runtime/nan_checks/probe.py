"""A program that checks the results of every op: it finds the op, device and operands of the first NaN.

The checks are a part of the compiled program, so that a donated argument need not be kept to run the step
again. Each tensor is reduced to one number on its device, without its padding; one small vector per device is
kept, and carried through loops and branches.

    clock | when | site + 1 | kinds of the operands | first bad argument + 1 | first bad result + 1 | any bad

The clock counts checks. All devices go through the same loops, so it is the same time on all. A partial sum
is checked as it is: a NaN in one summand is a NaN of the sum, and one that only the sum has (infinity minus
infinity) is found after the move that adds up.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives
from numpy.typing import NDArray

from sbp.communication.protocol import Context
from sbp.compat.untyped import pmax
from sbp.layout import Layout
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version, writes
from sbp.passes.program.control import CONTROL, Leaving, Port, Region, ports
from sbp.passes.program.graph import Const, Node, Operand
from sbp.passes.program.names import loop_name
from sbp.passes.render.user_lines import clean_scope
from sbp.runtime.lower.device import Device, Env, Shards
from sbp.runtime.lower.key_counts import ExchangeReport
from sbp.signature import NdSbp, Partial

CLOCK, WHEN, SITE, KINDS, ARGUMENT, RESULT, ANY = range(7)
"""The places of the vector."""
WIDTH = 7
MARK = -1
"""The id under which the first four lie among the values of a device."""
MARKS: Version = (MARK, ())
BEGUN: Version = (MARK - 1, ())


class NotFinite(IntFlag):
    """The kinds of values of a tensor that are not finite."""

    NAN = 1
    INFINITY = 2

    @property
    def words(self) -> str:
        """In words."""
        return " and ".join(
            {NotFinite.NAN: "NaN", NotFinite.INFINITY: "infinity"}[k] for k in NotFinite if k in self
        )


_NONE = NotFinite(0)


@dataclass(frozen=True)
class ProbedOp:
    """A check.

    Arguments:
      what: the op that made the value, with its line, in words.
      value, nd: which of its results, and its signature.
      summed: whether it is checked after the move that adds it up.
    """

    what: str
    value: int
    nd: NdSbp
    summed: bool = False


@dataclass(frozen=True)
class ProbeFinding:
    """The result of a check, before it is stored.

    Arguments:
      site: its number, from 1 on.
      kinds: the kinds of its values.
      operands: the kinds of its operands.
    """

    site: int
    kinds: jax.Array
    operands: Sequence[jax.Array | NotFinite]


@dataclass
class NanProbe:
    """The checks of a program.

    Arguments:
      refused_kinds: the kinds of values that a result may not hold.
      legal: what it may hold, and who demands that.
      sites: in the order in which they were traced; one in a loop may occur more than once.
    """

    refused_kinds: NotFinite
    legal: str = ""
    sites: list[ProbedOp] = field(default_factory=list)

    def another(self) -> NanProbe:
        """A probe with the same settings, for another program."""
        return NanProbe(self.refused_kinds, self.legal)

    def device(
        self,
        physical: Physical,
        coords: Sequence[jax.Array],
        reports: list[ExchangeReport] | None = None,
        in_order: frozenset[int] = frozenset(),
        marks: Mapping[int, str] | None = None,
    ) -> CheckedDevice:
        """A device that checks the results of its ops; arguments as of `Device`."""
        made_by = physical.graph.producers()
        return CheckedDevice(physical, coords, reports, in_order, marks or {}, watch=self, producers=made_by)


@dataclass(frozen=True)
class CheckedDevice(Device):
    """Executes steps on one device's shards, and checks the result of each."""

    watch: NanProbe = field(default_factory=lambda: NanProbe(NotFinite.NAN))
    producers: Mapping[int, Node] = field(default_factory=dict)
    findings: list[ProbeFinding] = field(default_factory=list)

    def run(self, steps: Sequence[Step], env: Env) -> None:
        """Executes `steps`, and stores the findings at their end."""
        here = replace(self, findings=[])
        super(CheckedDevice, here).run(steps, env)
        here.note_first(env)

    def begin(self, ins: Leaving, env: Env) -> None:
        """Checks the arguments."""
        first = self._first([self.kinds(x, nd, env) for x, nd in ins])
        env.update({MARKS: jnp.zeros(4, np.int32), BEGUN: first})

    def end(self, outs: Leaving, env: Env) -> Shards:
        """The vector of this device, "1 7"."""
        kinds = [
            jnp.asarray(self.kinds(x, nd, env), np.int32) & int(self.watch.refused_kinds) for x, nd in outs
        ]
        result, bad = self._first(kinds), jnp.int32(0)
        for k in kinds:
            bad = bad | k
        if kinds:
            bad = pmax(bad, self.physical.placement.axes)
        return (jnp.concatenate([env[MARKS], jnp.stack([env[BEGUN], result, bad])])[None],)

    def _first(self, kinds: Sequence[jax.Array | NotFinite]) -> jax.Array:
        refused = np.int32(self.watch.refused_kinds)
        bad = [jnp.asarray(k, np.int32) & refused for k in kinds]
        first: jax.Array = jnp.int32(0)
        if bad:
            found = jnp.stack(bad) > 0
            first = jnp.where(found.any(), jnp.argmax(found) + 1, 0).astype(np.int32)
        return first

    def kinds(self, x: Operand, nd: NdSbp, env: Env) -> jax.Array | NotFinite:
        """The kinds of values of this device's shard, as an int32; each shard is checked once."""
        if isinstance(x, Const):
            return kinds_of(np.asarray(x.value, x.dtype))
        value = self.physical.graph.values[x]
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return NotFinite(0)
        # Beside the tensor, in the same scope of tracing: ids are from 0 on, and a signature is never ().
        at: Version = (~x, nd)
        if at not in env:
            layout = Layout(value.shape, nd, self.physical.placement.shape)
            local = Context(primitives.copy_p, {}, (layout,), (), self.coords)
            shard = local.mask(env[x, nd], layout, range(len(value.shape)), 0)
            nan, infinite = (jnp.any(test(shard)).astype(np.int32) for test in (jnp.isnan, jnp.isinf))
            env[at] = nan * int(NotFinite.NAN) + infinite * int(NotFinite.INFINITY)
        return env[at]

    def note(self, site: ProbedOp, operands: Sequence[jax.Array | NotFinite], env: Env) -> None:
        """Checks a result; `note_first` stores the finding."""
        made = self.kinds(site.value, site.nd, env)
        if isinstance(made, NotFinite):
            return
        self.watch.sites.append(site)
        self.findings.append(ProbeFinding(len(self.watch.sites), made, operands))

    def note_first(self, env: Env) -> None:
        """Stores the first bad finding since this was called last.

        All at once: marks that change with every op would be a chain of thousands of fusions, each of which
        XLA computes again for the next, so that compiling takes minutes.
        """
        if not self.findings:
            return
        marks, n = env[MARKS], len(self.findings)
        # Traced values have no hash, so that they are told apart by identity.
        of: dict[int, jax.Array | NotFinite] = {id(_NONE): _NONE}
        of.update((id(k), k) for s in self.findings for k in (s.kinds, *s.operands))
        place = {x: i for i, x in enumerate(of)}
        kinds = jnp.stack([jnp.asarray(k, np.int32) for k in of.values()])
        made = (
            kinds[np.array([place[id(s.kinds)] for s in self.findings])] & np.int32(self.watch.refused_kinds)
        ) > 0
        i = jnp.argmax(made).astype(np.int32)
        # A row per op, as wide as that with most operands.
        rows = itertools.zip_longest(
            *[[place[id(k)] for k in s.operands] for s in self.findings], fillvalue=0
        )
        had = jnp.int32(0)
        for column in rows:
            had = had | kinds[jnp.asarray(column, np.int32)[i]]
        site = jnp.asarray([s.site for s in self.findings], np.int32)[i]
        clock = marks[CLOCK]
        found = jnp.stack([clock + n, clock + i + 1, site, had])
        first = (marks[SITE] == 0) & made.any()
        env[MARKS] = jnp.where(first, found, marks.at[CLOCK].set(clock + n))
        self.findings.clear()

    def compute(self, steps: Sequence[Compute], env: Env) -> None:
        """Runs ops, and checks their results."""
        super().compute(steps, env)
        for step in steps:
            given = zip(step.node.inputs, step.strategy.operands, strict=True)
            had = [self.kinds(x, nd, env) for x, nd in given]
            for v, nd in writes(step):
                self.note(ProbedOp(said_of(step.node), v, nd), had, env)

    def move(self, step: Box, env: Env) -> None:
        """Moves a tensor, and checks it if the move adds up."""
        super().move(step, env)
        self.check_sum(step, env)

    def bucket(self, steps: Sequence[Step], i: int, env: Env) -> int:
        """As `move`, of all in a bucket."""
        end = super().bucket(steps, i, env)
        for step in steps[i:end]:
            if isinstance(step, Box):
                self.check_sum(step, env)
        return end

    def check_sum(self, step: Box, env: Env) -> None:
        """Checks the result of a move that adds up."""
        before, after = step.move.before, step.move.after
        pairs = zip(before, after, strict=True)
        node = self.producers.get(step.value)
        if node is not None and any(isinstance(b, Partial) and not isinstance(a, Partial) for b, a in pairs):
            self.note(
                ProbedOp(said_of(node), step.value, after, True), [self.kinds(step.value, before, env)], env
            )

    def border(self, step: Border, env: Env) -> None:
        """Runs a loop or a branch, with the marks as one more carried value."""
        self.note_first(env)
        outs = CONTROL[step.node.op].lower(self.region(step, env))
        wired = [p for p in ports(step.node) if p.result is not None]
        stacked = sum(p.stacked and p.operand is None for p in wired)
        marks = outs.pop(len(wired) - stacked)
        env.update(zip(writes(step), outs, strict=True))
        env[MARKS] = marks

    def region(self, step: Border, env: Env) -> Region:
        """The loop or the branch, with a port for the marks."""
        found, bodies = super().region(step, env), len(step.node.bodies)
        at, every = len(found.ports), tuple(range(bodies))
        port = Port(operand=-1, result=-1, enters=(MARK,), leaves=(MARK,) * bodies, bodies=every)
        return replace(
            found,
            ports=(*found.ports, port),
            inner_signatures=(*found.inner_signatures, ()),
            outer={**found.outer, at: env[MARKS]},
        )

    def body_env(self, step: Border, k: int, entering: Mapping[int, jax.Array], env: Env) -> Env:
        """The environment of a body."""
        at = len(ports(step.node))
        inner = super().body_env(step, k, {i: x for i, x in entering.items() if i != at}, env)
        return {**inner, MARKS: entering[at]}


def said_of(node: Node) -> str:
    """An op with its line."""
    scope = clean_scope(node.source.scope)
    return f"{loop_name(node)} at {node.source}" + (f" in {scope}" if scope else "")


def kinds_of(x: NDArray[np.generic]) -> NotFinite:
    """The kind of a scalar of the program.

    >>> [kinds_of(np.float32(x)).words for x in ("nan", "-inf", "3")]
    ['NaN', 'infinity', '']
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return NotFinite(0)
    wide = x.astype(np.complex128) if np.iscomplexobj(x) else x.astype(np.float64)
    return NotFinite(
        int(np.isnan(wide).any()) * NotFinite.NAN | int(np.isinf(wide).any()) * NotFinite.INFINITY
    )
