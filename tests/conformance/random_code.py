"""Random programs: lists of lines of code, drawn choice by choice, and printed as the code that is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sbp
from sbp import B, P, S
from sbp.signature import Signature, format_sbp
from tests.conformance.random_holes import SIZES, Draw, Pick
from tests.conformance.random_ops import FAMILIES, Op, Value

GRIDS: tuple[Any, ...] = (
    [0, 1, 2, 3, 4, 5, 6, 7],
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    [0, 1, 2],
    [4, 0, 3, 1, 2],
    [[7, 5], [3, 1], [0, 2], [4, 6]],
    [[5, 0, 3], [1, 4, 2]],
)
EXACT = {"float32": 2.0**22, "bfloat16": 2.0**8, "complex64": 2.0**22}  # whole numbers below are exact
NOISE = {"float32": 1e-4, "bfloat16": 4e-2, "complex64": 1e-4}
MOST_ELEMENTS, MOST_DIMS, TAME = 2048, 4, 64.0
NAMES = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "sbp": sbp, "B": B, "P": P, "S": S}


@dataclass(frozen=True)
class Input:
    """An argument: a name, what it is, and how it lies (None: AUTO)."""

    at: int
    shape: tuple[int, ...]
    dtype: str
    sbp: list[Signature] | None


@dataclass(frozen=True)
class Line:
    """One statement, `v<at> = <text>`: what it reads, and what is known of its value."""

    at: int
    text: str
    reads: tuple[int, ...]
    value: Value


@dataclass(frozen=True)
class Program:
    """A random program.

    Arguments:
      grid: ranks of the placement, nested.
      splitting: whether it is planned for hardware on which everything is worth splitting.
      grad: whether gradients with respect to the float arguments are results too.
      outs: results, with signatures.
    """

    grid: Any
    splitting: bool
    grad: bool
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outs: tuple[tuple[int, list[Signature] | None], ...]

    @property
    def source(self) -> str:
        """The function, as code."""
        names = ", ".join(f"v{x.at}" for x in self.inputs)
        rows = [f"def f({names}):", *(f"    v{line.at} = {line.text}" for line in self.lines)]
        rows.append(f"    return [{', '.join(f'v{i}' for i, _ in self.outs)}]")
        return "\n".join(rows)

    @property
    def wrt(self) -> tuple[int, ...]:
        """The arguments that gradients are taken for."""
        floats = tuple(i for i, x in enumerate(self.inputs) if x.dtype == "float32")
        return floats if self.grad else ()

    def __repr__(self) -> str:
        args = ", ".join(f"tensor({x.at}, {x.shape}, {x.dtype!r})" for x in self.inputs)
        ins = ", ".join(_said(x.sbp) for x in self.inputs)
        outs = ", ".join(_said(nd) for _, nd in self.outs)
        if self.wrt:
            outs = f"[{outs}], None"
        return "\n".join(
            [
                "",
                self.source,
                f"args = [{args}]",
                f"fn = {f'with_gradients(f, {self.wrt})' if self.wrt else 'f'}",
                f'grid = sbp.placement("cpu", {self.grid})',
                f"options = sbp.Options({'hardware=SPLITTING' if self.splitting else ''})",
                f"program = sbp.compile(fn, grid, in_sbp=({ins},), out_sbp=({outs},), options=options)",
                "sbp.verify(program, *args)",
            ]
        )


def _said(nd: list[Signature] | None) -> str:
    return "None" if nd is None else format_sbp(nd)


ODD = (np.inf, -np.inf, np.nan, -0.0)
HOW_ODD = 0.15  # of the elements


def tensor(seed: int, shape: Sequence[int], dtype: str, odd: Sequence[str] = ()) -> Any:
    """Small whole numbers, or a key.

    Arguments:
      odd: dtypes of which some elements are infinite, NaN or -0.0 instead, or the ends of the integers.
    """
    if dtype.startswith("key"):
        return jax.random.key(seed)
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-4, 5, size=tuple(shape))
    if dtype in odd:
        kind = jnp.dtype(dtype)
        ends = ODD if jnp.issubdtype(kind, jnp.inexact) else (np.iinfo(kind).min, np.iinfo(kind).max)
        drawn = rng.choice(np.array(ends, np.float64), numbers.shape)
        return np.where(rng.random(numbers.shape) < HOW_ODD, drawn, numbers).astype(kind)
    if dtype == "bool":
        return numbers > 0
    if dtype == "complex64":
        return (numbers + 1j * numbers[::-1]).astype(dtype)
    return numbers.astype(jnp.dtype(dtype))


def with_gradients(f: Callable[..., Any], wrt: tuple[int, ...]) -> Callable[..., Any]:
    """The results of `f`, and the gradients of a number made from them."""

    def loss(*args: Any) -> Any:
        out = f(*args)
        smooth = [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum((jnp.sum(jnp.sin(jnp.real(x) + jnp.imag(x))) for x in smooth), 0.0), out

    def both(*args: Any) -> Any:
        grads, out = jax.grad(loss, wrt, has_aux=True)(*args)
        return out, grads

    return both


def function(program: Program) -> Callable[..., Any]:
    """The program as a function of one device."""
    space = dict(NAMES)
    exec(compile(program.source, "<random program>", "exec"), space)
    f: Callable[..., Any] = space["f"]
    return with_gradients(f, program.wrt) if program.wrt else f


def signature(pick: Pick, ndim: int, axes: int, extra: Sequence[Any] = ()) -> list[Signature]:
    """Any legal signature, uneven splits and splits of one dim by several axes included."""
    one_d = [B, *extra, *(S(d) for d in range(ndim)), *(S(d) for d in range(ndim))]
    return [pick(one_d) for _ in range(axes)]


def _inputs(pick: Pick, axes: int, grad: bool) -> list[Input]:
    sizes = [pick((*SIZES, 8, 4, 5)) for _ in range(3)]
    if pick(range(16)) == 15:
        sizes[0] = 0
    out = []
    dtypes = ("float32", "float32", "float32", "int32", "bool", *(() if grad else ("bfloat16", "complex64")))
    kinds = ["float32", "int32", *(pick(dtypes) for _ in range(pick((1, 2, 3)))), "key<fry>"]
    for at, dtype in enumerate(kinds):
        ndim = 0 if dtype == "key<fry>" else pick((1, 2, 2, 3))
        shape = tuple(pick(sizes) for _ in range(ndim))
        fixed = ndim and pick((True, True, False))
        out.append(Input(at, shape, dtype, signature(pick, ndim, axes) if fixed else None))
    return out


@dataclass
class _Writing:
    """A program as it is drawn."""

    pick: Pick
    axes: int
    grad: bool
    values: dict[int, Value]
    lines: list[Line]

    def shape_of(self, text: str, reads: Sequence[int]) -> Any:
        names = list(dict.fromkeys(reads))
        space = dict(NAMES)
        exec(f"def f({', '.join(f'v{i}' for i in names)}): return {text}", space)
        args = [_struct(self.values[i]) for i in names]
        return jax.eval_shape(space["f"], *args)

    def add(self, text: str, reads: Sequence[int], bound: float, noise: float, op: Op | None) -> int | None:
        made = self.shape_of(text, reads)
        size = int(np.prod(made.shape))
        dtype = str(made.dtype)
        if size > MOST_ELEMENTS or len(made.shape) > MOST_DIMS or (self.grad and dtype == "bfloat16"):
            return None
        at = len(self.values)
        if dtype in NOISE and (noise or bound > EXACT[dtype]):
            noise = max(noise, NOISE[dtype])
        elif dtype not in NOISE:
            noise = 0.0
        self.values[at] = Value(tuple(made.shape), dtype, bound, noise, op)
        self.lines.append(Line(at, text, tuple(reads), self.values[at]))
        return at

    def op(self) -> bool:
        """Adds a line of a random family; whether one was found."""
        op = self.pick(FAMILIES[self.pick(list(FAMILIES))])
        if self.grad and not op.backward:
            return False
        draw = Draw(self.pick, self.values, op, self.grad)
        text = draw.line()
        if text is None:
            return False
        read = [self.values[i] for i in draw.reads]
        noise = max((v.noise for v in read), default=0.0)
        noise = max(noise, 1e-9) if op.how == "smooth" else noise
        first = read[0] if read else Value((), "float32", 6.0, 0.0)
        reads = tuple(dict.fromkeys(draw.reads))
        made = self.shape_of(text, reads)
        bound = op.bound([v.bound for v in read] or [6.0], first, int(np.prod(made.shape)))
        at = self.add(text, reads, bound, noise, op)
        if at is None:
            return False
        self.tame(at)
        return True

    def tame(self, at: int) -> None:
        """Keeps values small, so that whole numbers stay exact and rounding stays small."""
        v = self.values[at]
        if v.bound <= (8.0 if v.dtype == "bfloat16" else TAME) or v.dtype not in (*NOISE, "int32"):
            return
        if v.dtype == "complex64":
            self.add(f"v{at} / {v.bound}", [at], 1.0, NOISE[v.dtype], None)
        elif v.noise:
            self.add(f"jnp.tanh(v{at} / 8)", [at], 1.0, v.noise, None)
        else:
            self.add(f"jnp.fmod(v{at}, 7)", [at], 6.0, 0.0, None)

    def annotate(self) -> None:
        """Fixes the signature of the newest value."""
        at = len(self.values) - 1
        v = self.values[at]
        if v.dtype == "key<fry>" or not self.lines or "annotate" in self.lines[-1].text:
            return
        waits = v.made is not None and v.made.sums and v.dtype != "bool"
        nd = signature(self.pick, len(v.shape), self.axes, (P,) if waits else ())
        cotangent = f", grad={format_sbp(signature(self.pick, len(v.shape), self.axes))}" if self.grad else ""
        self.add(f"sbp.annotate(v{at}, {format_sbp(nd)}{cotangent})", [at], v.bound, v.noise, None)


def _struct(v: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        v.shape, jax.random.key(0).dtype if v.dtype == "key<fry>" else jnp.dtype(v.dtype)
    )


def draw_program(pick: Pick) -> Program:
    """A program whose every choice is made by `pick`, the simplest first."""
    grid = pick(GRIDS)
    axes = np.ndim(grid)
    grad, splitting = pick((False, False, True)), pick((True, True, False))
    inputs = _inputs(pick, axes, grad)
    known = {x.at: Value(x.shape, x.dtype, 6.0 if x.dtype == "complex64" else 4.0, 0.0) for x in inputs}
    writing = _Writing(pick, axes, grad, known, [])
    for _ in range(pick(range(5, pick((12, 20, 31))))):
        if writing.op() and pick((False, False, True)):
            writing.annotate()
    return finished(grid, splitting, writing, inputs)


def finished(grid: Any, splitting: bool, writing: _Writing, inputs: Sequence[Input]) -> Program:
    """What was drawn as a program: values that nobody reads are its results."""
    used = {i for line in writing.lines for i in line.reads}
    ends = [line.at for line in writing.lines if line.at not in used][-6:] or [0]
    outs = []
    for i in ends:
        v = writing.values[i]
        fixed = v.dtype != "key<fry>" and writing.pick((False, True))
        outs.append((i, signature(writing.pick, len(v.shape), writing.axes) if fixed else None))
    return without_dead(
        Program(grid, splitting, writing.grad, tuple(inputs), tuple(writing.lines), tuple(outs))
    )


def without_dead(program: Program) -> Program:
    """The same without lines and arguments that no result needs."""
    needed = {i for i, _ in program.outs}
    lines = []
    for line in reversed(program.lines):
        if line.at in needed:
            lines.append(line)
            needed.update(line.reads)
    inputs = tuple(x for x in program.inputs if x.at in needed)
    return replace(program, lines=tuple(reversed(lines)), inputs=inputs)
