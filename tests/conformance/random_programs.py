"""Random programs under random signatures, against the same function on one device.

    python -m tests.conformance.random_programs --count 2000 --seed 0 [--shard 0/2] [--odd]

runs many, and prints those that fail; `--only 17` makes the program of that number as small as it can. With
`--odd` arguments have infinities, NaN, -0.0 and the ends of integers: see `run_odd`.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.errors import RuleError
from sbp.hardware.catalogue import Hardware, Link
from sbp.passes.explain.collectives import InnerCollective, communication_steps
from sbp.passes.physical.program import Compute, Physical
from sbp.passes.program.views import communication_of, op_of
from sbp.runtime.hlo.meter import read_compiled, read_hlo
from tests.annotated import annotated
from tests.conformance.random_code import NOISE, Input, Program, draw_program, function, tensor, without_dead
from tests.rules.special import unlike

FAST = {"xla_backend_optimization_level": 0}
# Ops cost, sending does not: what can run split, does.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e12, 1e-9),), 1.0)
# Bytes that the text of a program does not tell: of the branch taken, of a loop whose length depends on data.
UNMEASURED = re.compile(r"\b(?:cond|switch|while_loop)\(")
# JAX drops what an op does not use: where a slice starts that takes all of a dim, one result of several.
# It drops empty tensors too.
UNREAD = re.compile(r"\b(?:dynamic_\w+|top_k)\(|\bscan\(.*\)\[[01]\]")
TRIALS = 60  # of making a failing program smaller


@dataclass(frozen=True)
class Outcome:
    """What happened to a program.

    Arguments:
      kind: "equal", "refused" (an error of ours), "differs", "crashed", "sends" (not the bytes planned),
        "miscompiled": the plain program is wrong once it is jitted, ours is as JAX computes it op by op; or
        "attributed": infinities or NaN differ by default, as the plan says they may, and not if strict.
      what: the particulars.
      planned, sent: bytes on the wire, of the plan and of the compiled program: XLA drops collectives of
        constants, and those that occur twice, so that may be less.
    """

    kind: str
    what: str = ""
    planned: float = 0.0
    sent: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with the compiler."""
        return self.kind in ("equal", "refused", "miscompiled", "attributed")


@dataclass(frozen=True)
class Execution:
    """The results on many devices and on one; bytes as planned, in the lowered and the compiled program.

    Arguments:
      shared: bytes that the plan counts once, and that several ops of the lowered program send: XLA merges
        them.
    """

    got: Sequence[Any]
    want: Sequence[Any]
    planned: float
    shared: float
    lowered: float
    compiled: float
    physical: Physical


def execute(
    fn: Callable[..., Any],
    args: Sequence[Any],
    grid: Any,
    in_sbp: Any,
    out_sbp: Any,
    splitting: bool,
    strict: bool = False,
) -> Execution:
    """Runs a function on the devices of `grid` and on one; compiled in a hurry.

    Arguments:
      splitting: whether it is planned for hardware on which everything is worth splitting.
      strict: whether sums are added up before anything is computed from them.
    """
    hardware = SPLITTING if splitting else None
    options = sbp.Options(check=True, hardware=hardware, strict_nonfinite=strict)
    on = sbp.placement("cpu", grid)
    kept = annotated(fn, on, in_sbp)
    program = sbp.compile(kept, on, in_sbp=in_sbp, out_sbp=out_sbp, options=options)
    plan = program.plan(*args)
    lowered = program.lower(*args)
    compiled = lowered.compile(compiler_options=FAST)
    got = compiled(*jax.tree.leaves(program.place(*args)), *plan.physical.graph.consts)
    want = jax.tree.leaves(jax.jit(fn).lower(*args).compile(compiler_options=FAST)(*args))
    before = read_hlo(lowered.compiler_ir("hlo").as_hlo_text()).wire_bytes
    after = read_compiled(compiled).wire_bytes
    return Execution(got, want, plan.wire_bytes, shared_bytes(plan.physical), before, after, plan.physical)


def shared_bytes(physical: Physical) -> float:
    """What ops send beyond what the plan counts, since others send the same."""
    inside = [(step, times) for step, times in physical.walk() if isinstance(step, Compute)]
    hierarchy = physical.placement.shape
    every = sum(
        n * t.wire_bytes
        for s, n in inside
        for t in communication_of(physical.graph, s.node, s.strategy.signatures, hierarchy)
    )
    once = sum(
        e.times * x.communication.wire_bytes
        for x, e in communication_steps(physical)
        if isinstance(x, InnerCollective)
    )
    return every - once


def run(program: Program) -> Outcome:
    """Runs a program, and compares everything."""
    args = [tensor(x.at, x.shape, x.dtype) for x in program.inputs]
    outs: Any = [nd for _, nd in program.outs]
    out_sbp = (outs, None) if program.wrt else outs
    in_sbp = tuple(x.sbp for x in program.inputs)
    try:
        done = execute(function(program), args, program.grid, in_sbp, out_sbp, program.splitting)
    except RuleError as e:  # nobody has registered a rule here: one of our own is wrong
        return Outcome("crashed", f"{type(e).__name__}: {e}")
    except sbp.SbpError as e:
        return Outcome("refused", "; ".join(p.why for p in e.problems))
    except Exception as e:
        return Outcome("crashed", f"{type(e).__name__}: {e}")
    wrong = list(differences(program, done.got, done.want))
    if wrong:
        with jax.disable_jit():
            op_by_op = jax.tree.leaves(function(program)(*args))
        right = not any(differences(program, done.got, op_by_op))
        return Outcome("miscompiled" if right else "differs", "\n".join(wrong))
    return measured(program, done)


def measured(program: Program, done: Execution) -> Outcome:
    """Of a program whose results are right: whether it sends what was planned."""
    text = program.source
    if UNMEASURED.search(text):
        return Outcome("equal")
    empty = any(line.value.size == 0 for line in program.lines)
    least = 0.0 if empty or UNREAD.search(text) else 0.99 * done.planned
    wide = "bfloat16" in repr(program)  # which XLA on CPUs sends as float32
    most = 1.01 * (done.planned + done.shared)
    right = least <= done.lowered <= most and (wide or done.compiled <= 1.01 * done.planned)
    what = f"{done.planned} bytes planned, {done.lowered} in the program, {done.compiled} compiled"
    return Outcome("equal" if right else "sends", what, done.planned, done.planned if wide else done.compiled)


def run_odd(program: Program, integers: bool) -> Outcome:
    """Runs a program on odd values, and compares NaN, infinities, signs and values.

    If strict, everything equals one device. By default it may differ only where the plan has an op that says
    so (`Row.needs_finite`).

    Arguments:
      integers: whether the ends of integers are among the arguments, and only what is computed from integers
        alone is compared: as floats they are so large that the order of additions shows.
    """
    odd = ("int32",) if integers else ("float32", "bfloat16", "complex64")
    args = [tensor(x.at, x.shape, x.dtype, odd) for x in program.inputs]
    fn, outs = function(program), [nd for _, nd in program.outs]
    asked = program.grid, tuple(x.sbp for x in program.inputs), (outs, None) if program.wrt else outs
    for strict in (True, False):
        try:
            done = execute(fn, args, *asked, program.splitting, strict)
        except RuleError as e:
            return Outcome("crashed", f"strict={strict}: {type(e).__name__}: {e}")
        except sbp.SbpError as e:
            return Outcome("refused", "; ".join(p.why for p in e.problems))
        except Exception as e:
            return Outcome("crashed", f"strict={strict}: {type(e).__name__}: {e}")
        wrong = list(odd_differences(program, done.got, done.want, integers))
        if wrong and not (strict or integers) and needs_finite(done.physical):
            return Outcome("attributed", "\n".join(wrong))
        if wrong:
            with jax.disable_jit():
                op_by_op = jax.tree.leaves(fn(*args))
            right = not any(odd_differences(program, done.got, op_by_op, integers))
            return Outcome("miscompiled" if right else "differs", f"strict={strict}\n" + "\n".join(wrong))
    return Outcome("equal")


def needs_finite(physical: Physical) -> bool:
    """Whether some op of the plan may treat infinities otherwise than one device.

    Those that add up or negate the parts of a sum lose the sign of a zero alone, which is not compared here.
    """
    graph = physical.graph
    for step, _ in physical.walk():
        if isinstance(step, Compute):
            shapes = [[graph.operand(x).shape for x in xs] for xs in (step.node.inputs, step.node.outputs)]
            op = op_of(graph, step.node, *shapes, 1)
            rows = (r for r in step.strategy.rows if r.multiplies or r.finite_only)
            if any(row.needs_finite(op) for row in rows):
                return True
    return False


def odd_differences(
    program: Program, got: Sequence[Any], want: Sequence[Any], integers: bool
) -> Iterator[str]:
    """Results that differ in NaN, in an infinity, in a sign, or by more than rounding.

    What follows from a `top_k` is left out: XLA on CPUs orders NaN by its sign, and which sign the NaN of a
    sum has depends on the order of the addends.
    """
    exact = {x.at for x in program.inputs if x.dtype in ("int32", "bool")}
    ordered: set[int] = set()
    for line in program.lines:
        if exact.issuperset(line.reads) and line.value.dtype in ("int32", "bool"):
            exact.add(line.at)
        if "top_k(" in line.text or ordered.intersection(line.reads):
            ordered.add(line.at)
    outs = [at not in ordered and (not integers or at in exact) for at, _ in program.outs]
    outs += [not ordered and not integers] * (len(got) - len(outs))  # gradients
    for i, (a, b, told) in enumerate(zip(got, want, outs, strict=True)):
        if not told:
            continue
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        x, y = np.asarray(a), np.asarray(b)
        noise = NOISE.get(str(y.dtype), 0.0)
        with np.errstate(all="ignore"):
            size = np.max(np.abs(y), initial=1.0, where=np.isfinite(y)) if y.dtype != bool else 1.0
            off = unlike(x, y, 10 * noise * float(size), signs=False)
        if off:
            yield f"result {i}: {off}"


def differences(program: Program, got: Sequence[Any], want: Sequence[Any]) -> Iterator[str]:
    """What is wrong with each result."""
    known = {line.at: line.value for line in program.lines}
    values = [known.get(i) for i, _ in program.outs]
    worst = max((line.value.noise for line in program.lines), default=0.0)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"result {i}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
            continue
        if i >= len(values):
            size = float(np.nanmax(np.abs(b), initial=1.0))
            close = 10 * max(worst, NOISE["float32"]) * size
        else:
            value = values[i]
            close = value.noise * max(1.0, value.bound) if value else 0.0
        off = distance(a, b)
        if not off <= close:
            yield f"result {i}: {off:.2g} off where {close:.2g} is rounding\n{a}\nnot\n{b}"


def distance(a: Any, b: Any) -> float:
    """The largest difference of two arrays; infinite where only one of them is finite."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    wide = np.complex128 if jnp.iscomplexobj(b) else np.float64
    x, y = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    with np.errstate(invalid="ignore"):
        off = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))


def smaller(p: Program) -> Iterator[Program]:
    """Programs that are a little simpler."""
    if len(p.outs) > 1:
        yield from (replace(p, outs=(out,)) for out in p.outs)
        yield from (replace(p, outs=tuple(o for o in p.outs if o != out)) for out in p.outs)
    for line in reversed(p.lines):
        rest = tuple(x for x in p.lines if x is not line)
        v = line.value
        if v.dtype != "key<fry>":
            yield replace(p, lines=rest, inputs=(*p.inputs, Input(line.at, v.shape, v.dtype, None)))
        if (line.at, None) in p.outs and len(p.outs) == 1:
            yield from (replace(p, outs=((i, None),), lines=rest) for i in line.reads)
        if "sbp.annotate" in line.text:
            yield _without_annotation(p, line.at, line.reads[0])
    if p.grad:
        yield replace(p, grad=False)
    yield from (replace(p, inputs=_replaced(p.inputs, x, replace(x, sbp=None))) for x in p.inputs if x.sbp)
    yield from (replace(p, outs=_replaced(p.outs, o, (o[0], None))) for o in p.outs if o[1])


def _replaced(items: Sequence[Any], old: Any, new: Any) -> tuple[Any, ...]:
    return tuple(new if x is old else x for x in items)


def _without_annotation(p: Program, at: int, of: int) -> Program:
    """The same, with the value `of` in the place of its annotated copy `at`."""
    lines = tuple(
        replace(
            line,
            text=re.sub(rf"\bv{at}\b", f"v{of}", line.text),
            reads=tuple(of if i == at else i for i in line.reads),
        )
        for line in p.lines
        if line.at != at
    )
    return replace(p, lines=lines, outs=tuple((of if i == at else i, nd) for i, nd in p.outs))


def shrunk(program: Program, kind: str, run: Callable[[Program], Outcome] = run) -> Program:
    """The smallest program found whose outcome is still `kind`."""
    trials, found = 0, True
    while found:
        found = False
        for candidate in map(without_dead, smaller(program)):
            trials += 1
            if trials > TRIALS:
                return program
            if run(candidate).kind == kind:
                program, found = candidate, True
                break
    return program


def main() -> None:
    """Runs many programs, and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th program, from the i-th")
    parser.add_argument(
        "--only", type=int, help="one program of the seed, printed and made smaller if it fails"
    )
    parser.add_argument("--odd", action="store_true", help="infinities, NaN, -0.0, the ends of integers")
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    i, n = map(int, asked.shard.split("/"))
    numbers = range(i, asked.count, n) if asked.only is None else [asked.only]
    kinds: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    began, planned, less = time.monotonic(), 0.0, 0
    for done, number in enumerate(numbers):
        if done % 50 == 49:
            jax.clear_caches()
        program = draw_program(random.Random(f"{asked.seed}.{number}").choice)
        if asked.only is not None:
            print(program)
        check = partial(run_odd, integers=number % 4 == 3) if asked.odd else run
        outcome = check(program)
        kinds[outcome.kind] += 1
        if done % 50 == 49:
            print(f"{done + 1} programs, {time.monotonic() - began:.0f} s: {dict(kinds)}", flush=True)
        planned += outcome.planned
        less += outcome.sent < 0.99 * outcome.planned
        if outcome.kind == "refused":
            refusals[outcome.what] += 1
        if not outcome.good or outcome.kind == "miscompiled":
            print(
                f"\n== seed {asked.seed}, program {number}: {outcome.kind}\n{outcome.what[:2000]}", flush=True
            )
            print(program if asked.only is None else shrunk(program, outcome.kind, check), flush=True)
    print(f"\n{sum(kinds.values())} programs in {time.monotonic() - began:.0f} s: {dict(kinds)}")
    print(f"{planned:.0f} bytes planned; {less} programs send less once XLA has compiled them")
    for why, times in refusals.most_common():
        print(f"refused {times} x {why}")


if __name__ == "__main__":
    main()
