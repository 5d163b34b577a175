"""Programs whose results may not be NaN: raises with the first op that made one, and its line.

`Options(debug_nans=True)` asks for it, or JAX's `jax_debug_nans` and `jax_debug_infs`. JAX would run the
program again op by op on every device, padding included, and knows only the lines of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sbp.compat.core import is_key, setting
from sbp.errors import NonFiniteError, Problem
from sbp.options import Options
from sbp.passes.physical.program import Physical
from sbp.placement import Placement
from sbp.runtime.nan_checks.probe import (
    ANY,
    ARGUMENT,
    KINDS,
    RESULT,
    SITE,
    WHEN,
    NanProbe,
    NotFinite,
    ProbedOp,
)
from sbp.runtime.processes.process_group import process_group
from sbp.signature import format_sbp

SETTINGS = {"jax_debug_nans": NotFinite.NAN, "jax_debug_infs": NotFinite.INFINITY}
"""What JAX refuses under which of its settings."""
BY_SETTINGS = "finite numbers, as jax_debug_nans and jax_debug_infs demand"
BY_OPTION = "no NaN, as Options(debug_nans=True) demands"
BEFORE, LAST = -1, 1 << 60
"""Before and behind all that has a place in a step."""
TRY = "jax.debug.print beside that line; jax.numpy.where before the op, not behind it"


def refused_by(options: Options) -> NotFinite:
    """What results may not hold: by the option, and by JAX's settings now."""
    found = NotFinite.NAN if options.debug_nans else NotFinite(0)
    for name, kind in SETTINGS.items():
        found |= kind if setting(name) else NotFinite(0)
    return found


def watch_of(options: Options) -> NanProbe | None:
    """The NaN probe of a program; None if nothing is refused."""
    refused = refused_by(options)
    by = BY_SETTINGS if any(map(setting, SETTINGS)) else BY_OPTION
    return NanProbe(refused, by) if refused else None


@dataclass(frozen=True)
class Finding:
    """The finding of the devices of a program in one step, in words, so that processes can exchange it.

    Arguments:
      order: its time; the least of all findings is the first.
      where: the result that holds a NaN, or "" if it is not known here.
      got: what it holds.
      why: the op that made it.
      came: whether it came in with an argument.
      ranks: of the devices of this process that had it first.
      of: the number of devices.
      placement: all of them, in words.
    """

    order: tuple[int, ...]
    where: str
    got: str
    why: str
    came: bool = False
    ranks: tuple[int, ...] = ()
    of: int = 0
    placement: str = ""

    def with_devices(self, every: Sequence[Finding]) -> str:
        """The op that made it, and all devices that had it first, of any process.

        Arguments:
          every: the findings of all processes.
        """
        alike = [f for f in every if f.ranks and (f.order[:-1], f.why) == (self.order[:-1], self.why)]
        ranks = sorted(r for f in alike for r in f.ranks)
        return self.why if not ranks else f"{self.why}; {_where(ranks, self.of, self.placement)}"


def look(
    flags: jax.Array,
    watch: NanProbe,
    physical: Physical,
    paths: tuple[Sequence[str], Sequence[str]],
    name: str,
) -> None:
    """Waits for the vectors of all devices, and raises if a result holds a refused value.

    Arguments:
      flags: "devices 7", of runtime/nan_checks/probe.py.
      paths: names of the arguments, and of the results.

    Raises:
      NonFiniteError: on all processes, with the first finding of any device.
    """
    rows = rows_of(flags)
    if not any(row[ANY] for _, row in rows):
        return
    mine = finding_of(rows, watch, physical, paths)
    raise_first([mine] if mine is not None else [], name, watch.legal)


def rows_of(flags: jax.Array) -> list[tuple[int, NDArray[np.int32]]]:
    """The vectors of this process's devices, each with the position of its device."""
    shards = [(s.index[0].start or 0, np.asarray(s.data)[0]) for s in flags.addressable_shards]
    return sorted(shards, key=lambda x: x[0])


def finding_of(
    rows: Sequence[tuple[int, NDArray[np.int32]]],
    watch: NanProbe,
    physical: Physical,
    paths: tuple[Sequence[str], Sequence[str]],
    before: tuple[int, ...] = (),
) -> Finding | None:
    """The finding of some devices; None if they have none.

    Arguments:
      paths: names of the checked arguments, and of the results.
      before: what of the step ran before, if it is a part of one.
    """
    (ins, outs), graph = paths, physical.graph
    bad = NotFinite(max(int(r[ANY]) for _, r in rows)) or watch.refused_kinds
    got = bad.words
    result = min((int(r[RESULT]) for _, r in rows if r[RESULT]), default=0)
    where = outs[result - 1] if result else ""
    bad_in = min((int(r[ARGUMENT]) for _, r in rows if r[ARGUMENT]), default=0)
    if bad_in:
        path = ins[bad_in - 1] if bad_in <= len(ins) else graph.values[graph.inputs[bad_in - 1]].name
        # Before all ops of the step, whichever piece reads it.
        return Finding((BEFORE, *before, bad_in), where, got, f"it came in with {path}", True)
    when = min((int(r[WHEN]) for _, r in rows if r[SITE]), default=0)
    if not when:
        return unmade(where, bad) if where else None
    first = [(i, r) for i, r in rows if r[SITE] and r[WHEN] == when]
    site, had = watch.sites[int(first[0][1][SITE]) - 1], NotFinite(0)
    for _, r in first:
        had |= NotFinite(int(r[KINDS]))
    what = f"{site.what}: {graph.values[site.value]} {format_sbp(site.nd)}; {_operands(site, had)}"
    why = f"the first op whose result has one is {what}"
    place = physical.placement
    devices = tuple(place.ranks[i] for i, _ in first), len(place.ranks), str(place)
    return Finding((*before, when, first[0][0]), where, got, why, bool(had & watch.refused_kinds), *devices)


def reader_of(stages: Sequence[int], placement: Placement) -> str:
    """The stages that read an argument of a pipeline, in words.

    Arguments:
      stages: their numbers; () if the program has none.

    >>> from sbp.placement import placement
    >>> reader_of([1], placement("cpu", [4, 5])), reader_of([0, 3], placement("cpu", [4, 5]))
    ('which stage 1 reads', 'which stages 0 and 3 read')
    """
    if not stages:
        return f"which {placement} reads"
    *most, last = map(str, stages)
    return f"which stages {', '.join(most)} and {last} read" if most else f"which stage {last} reads"


def unmade(where: str, bad: NotFinite) -> Finding:
    """A result that holds a refused value if it is not known which op has made it."""
    return Finding((LAST,), where, bad.words, "no op of the program was seen to make it")


def _operands(site: ProbedOp, had: NotFinite) -> str:
    """The op's operands, in words."""
    what = "the shards that were added up" if site.summed else "its operands"
    return f"{what} have {had.words}" if had else f"{what} are finite"


def _where(ranks: Sequence[int], of: int, placement: str) -> str:
    """The devices that had it first."""
    if len(ranks) == of:
        return f"on all devices of {placement}" if of > 1 else f"on {placement}"
    return f"on device{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {placement}"


def raise_first(mine: Sequence[Finding], name: str, legal: str) -> None:
    """Raises the first finding of all processes, if a result is bad; all processes call this.

    Raises:
      NonFiniteError: the same one on all.
    """
    every = list(mine)
    others = process_group()
    if others is not None:
        told = others.gather(f"what {name} has found", [vars(f) for f in mine])
        lists = ("order", "ranks")
        every = [Finding(**{**f, **{k: tuple(f[k]) for k in lists}}) for fs in told for f in fs]
    if any(f.where for f in every):
        raise NonFiniteError(_problem(every, legal))


def _problem(every: Sequence[Finding], legal: str) -> Problem:
    first = min(every, key=lambda f: f.order)
    where = next(f.where for f in every if f.where)
    fix = "look at the ops that made them, in the step before" if first.came else TRY
    return Problem("nonfinite", where, first.got, legal, first.with_devices(every), fix)


def kinds_in(x: jax.Array) -> NotFinite:
    """The kinds of values of an array over devices of several processes, all of which call this."""
    if is_key(x.dtype) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return NotFinite(0)
    nan, infinite = map(bool, np.asarray(_looked_at(x)))
    return NotFinite(nan * NotFinite.NAN | infinite * NotFinite.INFINITY)


@jax.jit
def _looked_at(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.isnan(x).any(), jnp.isinf(x).any()])
