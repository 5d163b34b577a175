"""Needless gathers: what a program sends of one split argument, against what `jit` sends of it.

Every harness of JAX, and every reduction, cumulative op, comparison, sort and selection of `jax.numpy`, with
one argument split along one dim: `python -m tests.conformance.gathers --lines FILE`, and then `--page`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import sbp
from sbp.runtime.hlo.meter import read_compiled
from tests.conformance.harnesses import HASTY, STAYING, all_cases, arguments
from tests.conformance.worker import set_environment

GROUPS = (4, 2)
"""Numbers of devices, of which the first is taken that divides a dim: `jit` refuses others."""


@dataclass(frozen=True, slots=True)
class Program:
    """A function and its arguments; `group` is the op that it is of."""

    name: str
    group: str
    fn: Callable[..., Any]
    args: Callable[[], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Sent:
    """What is sent per device where one argument is split along one dim.

    Arguments:
      leaf, dim, devices: which argument, along which of its dims, over how many devices.
      jit_bytes: None where ours is nothing, and so nobody asked.
    """

    name: str
    group: str
    leaf: int
    dim: int
    devices: int
    our_bytes: float
    jit_bytes: float | None = None
    why: str = ""

    @property
    def needless(self) -> bool:
        """Whether more is sent than `jit` sends."""
        return self.jit_bytes is not None and self.our_bytes > self.jit_bytes


REASONS: dict[str, str] = {
    "select_and_gather_add": "Both operands send the rows beyond their edges, also one that was whole. "
    "It stands in second derivatives of max pooling only.",
    "select_and_scatter_add": "The gradient of max pooling along a split dim sends rows of what it scatters.",
    "gather": "A slice as long as its dim begins at 0 whatever the index says; XLA sees that.",
    "functions: roll": "A cyclic shift is two slices and a concatenation: the row that wraps around is added "
    "up over all devices, and not sent to one.",
}
"""Why more is sent than by `jit`, per group; of functions of no group, by name."""


def reason(found: Sent) -> str:
    """Why it sends more; "" where nobody knows."""
    return REASONS.get(found.group, REASONS.get(f"{found.group}: {found.name}", ""))


CRASHES = "select_and_gather_add_dilations"
"""Harnesses that end the process where `jit` partitions them (jax 0.12, `HandleReduceWindow` of XLA)."""
X = np.cos(np.arange(256.0, dtype=np.float32)).reshape(16, 16)
NUMPY: dict[str, Sequence[str]] = {
    "reductions": "all any argmax argmin count_nonzero max mean median min nanargmax nanargmin nanmax "
    "nanmean nanmin nanprod nanstd nansum nanvar prod ptp std sum var".split(),
    "cumulative ops": "cumsum cumprod nancumsum nancumprod".split(),
    "orders": "sort argsort".split(),
}
PLAIN: dict[str, Callable[..., Any]] = {
    "isfinite all": lambda x: jnp.isfinite(x).all(),
    "norm": jnp.linalg.norm,
    "norm of rows": lambda x: jnp.linalg.norm(x, axis=1),
    "logsumexp": jax.nn.logsumexp,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "top_k": lambda x: jax.lax.top_k(x, 4),
    "where of three": lambda x: jnp.where(x > 0, x, -x),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "searchsorted": lambda x: jnp.searchsorted(jnp.arange(8.0), x),
    "array_equal": lambda x: jnp.array_equal(x, x * 2),
    "allclose": lambda x: jnp.allclose(x, x * 2),
    "trace": jnp.trace,
    "diagonal": jnp.diagonal,
    "tril": jnp.tril,
    "matrix product": lambda x: x @ x,
    "gram": lambda x: x.T @ x,
    "outer": lambda x: jnp.outer(x[0], x[1]),
    "vdot": lambda x: jnp.vdot(x, x),
    "cov": jnp.cov,
    "histogram": lambda x: jnp.histogram(x, bins=8)[0],
    "bincount": lambda x: jnp.bincount((x.ravel() > 0).astype(int), length=2),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "flip": jnp.flip,
    "diff": lambda x: jnp.diff(x, axis=0),
    "shifted": lambda x: x.at[1:].set(x[:-1] * 2),
    "pad": lambda x: jnp.pad(x, 1),
    "stack": lambda x: jnp.stack([x, x]),
    "repeat": lambda x: jnp.repeat(x, 2, axis=0),
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "take": lambda x: x[jnp.array([0, 3, 5])],
    "one row": lambda x: x[3],
    "every other": lambda x: x[::2],
    "quantile": lambda x: jnp.quantile(x, 0.25),
    "percentile of columns": lambda x: jnp.percentile(x, 25, axis=0),
    "unwrap": jnp.unwrap,
    "interp": lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0)),
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x),
    "reduce by a function": lambda x: jax.lax.reduce(x, 0.0, lambda a, b: jnp.hypot(a, b), (0,)),
}


def _over(name: str, axis: int | None) -> Callable[..., Any]:
    return lambda x: getattr(jnp, name)(x, axis=axis)


def programs() -> Iterator[Program]:
    """All programs: those of `jax.numpy`, and JAX's harnesses."""
    for group, names in NUMPY.items():
        for name in names:
            for axis in (None, 0, 1):
                yield Program(f"jnp.{name}, axis={axis}", group, _over(name, axis), lambda: [X])
    for name, fn in PLAIN.items():
        yield Program(name, "functions", fn, lambda: [X])
    for case in all_cases():
        if case.supported and not case.name.startswith(CRASHES):
            yield Program(case.name, case.group, case.harness.dyn_fun, lambda case=case: arguments(case))  # type: ignore[misc]


def splits(args: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Each leaf, each of its dims, and the number of devices that it is split over."""
    for leaf, x in enumerate(jax.tree.leaves(args)):
        for dim, n in enumerate(np.shape(x)):
            devices = next((d for d in GROUPS if n and n % d == 0), None)
            if devices is not None:
                yield leaf, dim, devices


def sent(program: Program) -> Iterator[Sent]:
    """What is sent of each argument, split along each dim; nothing for what JAX does not run."""
    try:
        args = tuple(program.args())
        jax.eval_shape(program.fn, *args)
    except Exception:  # harnesses of what JAX does not support
        return
    for leaf, dim, devices in splits(args):
        ours, why = our_bytes(program.fn, args, leaf, dim, devices)
        theirs = None if not ours else jit_bytes(program.fn, args, leaf, dim, devices)
        yield Sent(program.name, program.group, leaf, dim, devices, ours, theirs, why)


def our_bytes(
    fn: Callable[..., Any], args: Sequence[Any], leaf: int, dim: int, devices: int
) -> tuple[float, str]:
    """What the plan sends per device, and its collectives."""
    leaves = [[sbp.B]] * len(jax.tree.leaves(args))
    leaves[leaf] = [sbp.S(dim)]
    in_sbp = jax.tree.unflatten(jax.tree.structure(tuple(args)), leaves)
    options, on = sbp.Options(hardware=STAYING), sbp.placement("cpu", shape=(devices,))

    def apart(*args: Any) -> Any:
        """Results that are not the next values of arguments, and so need not lie as these."""
        return {"results": fn(*args), "nothing": None, "scalar": jnp.zeros(())}

    plan = sbp.compile(apart, on, in_sbp=in_sbp, options=options).plan(*args)
    return plan.wire_bytes, "; ".join(f"{c.kind} of {c.tensor}" for c in plan.collectives)


def jit_bytes(fn: Callable[..., Any], args: Sequence[Any], leaf: int, dim: int, devices: int) -> float | None:
    """What `jit` sends per device with the same arguments; None for what XLA cannot compile, as extrema of
    complex numbers that are split."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    leaves = [NamedSharding(mesh, Spec())] * len(jax.tree.leaves(args))
    leaves[leaf] = NamedSharding(mesh, Spec(*[None] * dim, "x"))
    in_shardings = jax.tree.unflatten(jax.tree.structure(tuple(args)), leaves)
    lowered = jax.jit(fn, in_shardings=in_shardings).lower(*args)
    try:
        return read_compiled(lowered.compile(HASTY)).wire_bytes
    except jax.errors.JaxRuntimeError:
        return None


PAGE = Path(__file__).parents[2] / "docs" / "needless_gathers.md"
HEAD = """# Needless gathers

What a plan sends where one argument of a program is split along one of its dims and the others are whole,
against what `jax.jit` sends with the same arguments. The programs are JAX's harnesses of its own primitives,
and the reductions, cumulative ops, orders and selections of `jax.numpy`. Results may have any sharding.

`python -m tests.conformance.gathers --lines gathers.jsonl` runs them, and with `--page` writes this page; a
test finds no program that sends more than `jit` and is not in the second table.
"""


def page(rows: Sequence[Sent]) -> str:
    """The page: how many splits send how much, and those that send more than `jit`."""
    needless = defaultdict[str, list[Sent]](list)
    for found in rows:
        if found.needless:
            needless[found.group if found.group in REASONS else f"{found.group}: {found.name}"].append(found)
    more = sum(map(len, needless.values()))
    counted = {
        "nothing": sum(not f.our_bytes for f in rows),
        "less than `jit`": sum(f.our_bytes < (f.jit_bytes or 0) for f in rows if f.our_bytes),
        "as much": sum(f.our_bytes == f.jit_bytes for f in rows if f.our_bytes),
        "more": more,
    }
    lines = [
        HEAD,
        f"Of {len(rows):,} splits of {len({f.name for f in rows}):,} programs, on jax {jax.__version__}:\n",
    ]
    lines += ["| sent | splits |", "|---|---|", *(f"| {what} | {n:,} |" for what, n in counted.items()), ""]
    lines += ["More than `jit`:\n", "| program | splits | times as much | why |", "|---|---|---|---|"]
    for name, all_of in sorted(needless.items()):
        times = [f.our_bytes / f.jit_bytes for f in all_of if f.jit_bytes]
        spread = f"{min(times):.1f} to {max(times):.1f}" if times else "`jit` sends nothing"
        lines.append(
            f"| {name.removeprefix('functions: ')} | {len(all_of)} | {spread} | {reason(all_of[0])} |"
        )
    return "\n".join(lines) + "\n"


def read(file: Path) -> list[Sent]:
    """What was written line by line."""
    return [Sent(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def main(argv: Sequence[str]) -> int:
    """Runs all, or some; writes what was found line by line, and then the page."""
    p = argparse.ArgumentParser("python -m tests.conformance.gathers", description=__doc__)
    p.add_argument("--groups", default="", help="of harnesses, separated by commas")
    p.add_argument("--shard", default="0/1", help="i/n: every n-th program, from the i-th")
    p.add_argument("--lines", type=Path, required=True, help="the file of results")
    p.add_argument(
        "--page", action="store_true", help="write docs/needless_gathers.md of the lines, and run nothing"
    )
    options = p.parse_args(argv)
    if options.page:
        PAGE.write_text(page(read(options.lines)), encoding="utf-8")
        return 0
    set_environment()
    first, step = map(int, options.shard.split("/"))
    wanted = set(filter(None, options.groups.split(",")))
    with jax.enable_x64(True), options.lines.open("a", encoding="utf-8") as file:
        for i, program in enumerate(programs()):
            if i % step == first and (not wanted or program.group in wanted):
                file.writelines(json.dumps(asdict(found)) + "\n" for found in sent(program))
                file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
