"""Whether the rows of a rule are true: each is run on small data, shard by shard, and joined with NumPy.

A sample is a small JAX function that produces a primitive. Its equation is taken from the trace, its operands
are split as a row says (padding is NaN or the largest integer, partial shards are random), the rule's body
runs once per device, and what comes out must join to the plain result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from sbp import view
from sbp.communication.bits import identity_of
from sbp.communication.joint import results_of
from sbp.communication.protocol import Context
from sbp.compat import core
from sbp.errors import raise_all
from sbp.layout import Layout, split_shape
from sbp.passes.program.graph import Const, Node
from sbp.passes.program.trace import trace
from sbp.rules import Op, Row, lookup
from sbp.rules.registry import valid_rows
from sbp.runtime.hlo.meter import read_compiled
from sbp.runtime.lower.local_kernels import undeclared_collectives
from sbp.signature import NdSbp, P, Partial, Split
from tests.rules.special import PROMISED, from_numpy, special_draw, special_problem, to_numpy

Array = np.ndarray[Any, Any]
# Five over four: two full shards, one with padding, an empty one. Samples that matter most see more sizes.
GROUPS, MORE_GROUPS = (4,), (2, 3, 4)
# Nearly all the time goes into compiling hundreds of tiny programs: the compiler need not try hard.
HASTY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# Ops that no function of this JAX's public interface makes on this machine, or that have no result.
WITHOUT_SAMPLE = {
    "create_token": "no tensor",
    "eq_to": "total order, inside sorts only",
    "le_to": "total order, inside sorts only",
    "lt_to": "total order, inside sorts only",
    "debug_callback": "no result: it speaks to the host",
    "debug_print": "no result: it speaks to the host",
    "platform_index": "no operand: inside `lax.platform_dependent` only",
    "geqp3": "inside QR with pivots only",
    "geqrf": "inside QR only",
    "select_and_scatter": "of a user's functions; JAX makes select_and_scatter_add",
}


@dataclass(frozen=True, eq=False)
class Sample:
    """A function of arrays that produces the primitive `name`.

    Arguments:
      close: the relative and absolute difference that rounding may make; 0: bit for bit.
      groups: the axis sizes to try.
      pairs: how many compositions of two splitting rows to try on each 2-D hierarchy.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    close: float = 0.0
    groups: tuple[int, ...] = ()
    pairs: int = 1
    label: str = ""

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, np.shape(a))) or "scalar" for a in jax.tree.leaves(self.args))
        return f"{self.name}-{self.label or shapes}"


def sample(name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Sample:
    """A sample, with the options of `Sample`."""
    groups = MORE_GROUPS if options.get("pairs", 1) > 1 else GROUPS
    return Sample(name, fn, args, **{"groups": groups, **options})


def whole(
    shape: Sequence[int] = (), dtype: Any = np.float32, low: int = -4, high: int = 5, seed: int = 0
) -> Array:
    """Small whole numbers, so that sums and products of floats are exact."""
    if dtype == bool:
        low, high = 0, 2
    rng = np.random.default_rng([seed, *shape])
    out = rng.integers(low, high, size=tuple(shape)).astype(dtype)
    if np.dtype(dtype).kind == "c":
        out = out + 1j * rng.integers(low, high, size=tuple(shape)).astype(dtype)
    return np.asarray(out, dtype)


class Programs:
    """The programs of one equation: each is compiled once, for all rows and devices that share it."""

    def __init__(self) -> None:
        self.known: dict[str, Callable[..., list[Any]]] = {}

    def find(self, body: Callable[..., list[Any]], *args: Any) -> Callable[..., list[Any]]:
        """`body`, compiled for arguments like these."""
        closed = jax.make_jaxpr(body)(*args)
        key = f"{closed} {[np.asarray(c).tobytes() for c in closed.consts]}"
        if key not in self.known:
            self.known[key] = jax.jit(jaxpr_as_fun(closed), compiler_options=HASTY)
        program = self.known[key]
        return lambda *args: program(*jax.tree.leaves(args))


@dataclass(frozen=True)
class Application:
    """One equation with the values of its operands and its plain results."""

    node: Node
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    programs: Programs

    @cached_property
    def special(self) -> tuple[list[Array], tuple[Any, ...]]:
        """Other operands, of which many are special, and what one device makes of them."""
        rng = np.random.default_rng(1)
        kept = PROMISED.get(self.node.op, lambda params, n: ())(self.node.params, len(self.operands))
        given = [(to_numpy(x), x.dtype) for x in self.operands]
        values = [v if i in kept else special_draw(v, dtype, rng) for i, (v, dtype) in enumerate(given)]
        origin = (np.int32(0),)
        args = [from_numpy(v, x) for v, x in zip(values, self.operands, strict=True)]

        def plain(coords: Any, *args: Any) -> list[Any]:
            return core.bind(self.node.primitive, args, dict(self.node.params))

        return values, tuple(self.programs.find(plain, origin, *args)(origin, *args))

    def op(self, shapes: Sequence[Any], results: Sequence[Any], group: int) -> Op:
        """The equation as an axis of size `group` sees it, on the given shapes."""
        return Op(
            self.node.op,
            tuple(shapes),
            tuple(results),
            tuple(x.dtype for x in self.operands),
            tuple(x.dtype for x in self.results),
            self.node.params,
            group,
            tuple(x.shape for x in self.operands),
        )


@cache
def applications(one: Sample) -> list[Application]:
    """Every equation of the sample that is its primitive."""
    graph = trace(one.fn, one.args, {}).graph
    found = [node for node in graph.nodes if node.op == one.name]

    def run(*leaves: Any) -> list[list[Any]]:
        env = dict(zip(graph.inputs, [*leaves, *graph.consts], strict=True))

        def read(x: Any) -> Any:
            return jax.numpy.asarray(x.value, x.dtype) if isinstance(x, Const) else env[x]

        for node in graph.nodes[: max(node.id for node in found)]:
            values = core.bind(node.primitive, [read(x) for x in node.inputs], dict(node.params))
            env.update(zip(node.outputs, values, strict=True))
        return [[read(x) for x in node.inputs] for node in found]

    if not found:
        return []
    # What stands alone needs no program of its own.
    before = jax.jit(run, compiler_options=HASTY) if found[-1].id else run
    out = []
    for node, operands in zip(found, before(*jax.tree.leaves(one.args)), strict=True):

        def plain(coords: Any, *args: Any, node: Node = node) -> list[Any]:
            return core.bind(node.primitive, args, dict(node.params))

        programs, origin = Programs(), (np.int32(0),)
        results = programs.find(plain, origin, *operands)(origin, *operands)
        out.append(Application(node, tuple(operands), tuple(results), programs))
    return out


def as_sums(value: Array, group: int, rng: np.random.Generator) -> list[Array]:
    """Integers that wrap around on the way to their sum."""
    info = np.iinfo(value.dtype)
    size = (group - 1, *value.shape)
    parts: Array = rng.integers(info.min, info.max, size=size, dtype=value.dtype)
    return [*parts, value - np.sum(parts, axis=0, dtype=value.dtype)]


def filled(value: Array, op: str, group: int, rng: np.random.Generator) -> list[Array]:
    """Each element on one device only, what the reduction ignores on the others."""
    owner = np.zeros(value.shape, int) if op == "sum" else rng.integers(0, group, size=value.shape)
    empty = identity_of(op, value.dtype)
    return [np.where(owner == i, value, empty).astype(value.dtype) for i in range(group)]


def scattered(values: Sequence[Array], sbp: Sequence[NdSbp], hierarchy: tuple[int, ...]) -> list[view.Shards]:
    """The shards of every operand, partial ones random."""
    return [view.split(v, nd, hierarchy, seed=i) for i, (v, nd) in enumerate(zip(values, sbp, strict=True))]


def variants(values: Sequence[Array], row: Row, group: int) -> Iterator[list[view.Shards]]:
    """The operands split as `row` says: with random partials, partials that wrap, and filled ones."""
    plain = scattered(values, [(s,) for s in row.operands], (group,))
    yield plain
    rng = np.random.default_rng(0)
    sums = [i for i, s in enumerate(row.operands) if s == P and values[i].dtype.kind in "iu"]
    empty = [i for i, s in enumerate(row.operands) if isinstance(s, Partial) and (s != P or i in row.fills)]
    ways: list[tuple[list[int], Callable[[Array, Any], list[Array]]]] = [
        (sums, lambda v, s: as_sums(v, group, rng)),
        (empty, lambda v, s: filled(v, s.op, group, rng)),
    ]
    for which, make in ways:
        if which:
            changed = list(plain)
            for i in which:
                parts = make(values[i], row.operands[i])
                changed[i] = {(k,): part for k, part in enumerate(parts)}
            yield changed


class Claim:
    """The body of an equation on the shards of one N-D signature; compiled once, for every device."""

    def __init__(
        self, app: Application, ins: Sequence[NdSbp], outs: Sequence[NdSbp], hierarchy: tuple[int, ...]
    ) -> None:
        self.app, self.hierarchy = app, hierarchy
        self.operands = tuple(Layout(x.shape, nd, hierarchy) for x, nd in zip(app.operands, ins, strict=True))
        self.results = tuple(Layout(x.shape, nd, hierarchy) for x, nd in zip(app.results, outs, strict=True))
        rule = lookup(app.node.op)
        custom = rule.body if rule else None

        names = [f"a{i}" for i in range(len(hierarchy))]
        dtypes = [x.dtype for x in app.operands]

        static = Context(app.node.primitive, app.node.params, self.operands, self.results, (), names, dtypes)

        def body(coords: Sequence[Any], *args: Any) -> list[Any]:
            ctx = replace(static, coords=coords, collectives=[])
            results = results_of([custom(ctx, *args) if custom else ctx.bind(*args)])[0]
            raise_all(undeclared_collectives(app.node, ctx))
            return list(results)

        self.body, self.names = body, names
        self.communication = list(rule.communication(static)) if rule and rule.communication else []
        self.program: Callable[..., list[Any]] | None = None

    def run(self, shards: Sequence[view.Shards]) -> list[view.Shards]:
        """The result shards of every device."""
        if self.communication:
            return self.run_together(shards)
        out: list[view.Shards] = [{} for _ in self.results]
        for coords in view.coordinates(self.hierarchy):
            place = tuple(map(np.int32, coords))
            args = [from_numpy(s[coords], x) for s, x in zip(shards, self.app.operands, strict=True)]
            self.program = self.program or self.app.programs.find(self.body, place, *args)
            for kept, value in zip(out, self.program(place, *args), strict=True):
                kept[coords] = to_numpy(value)
        return out

    def run_together(self, shards: Sequence[view.Shards]) -> list[view.Shards]:
        """The same on devices that talk to each other; what they send is what the rule says."""
        places, k = list(view.coordinates(self.hierarchy)), len(self.hierarchy)
        size = len(places)
        devices = np.array(jax.devices()[:size]).reshape(self.hierarchy)
        spec = PartitionSpec(*self.names)
        stacked = []
        for s, like in zip(shards, self.app.operands, strict=True):
            x = np.stack([np.asarray(s[c]) for c in places])
            stacked.append(from_numpy(x.reshape(*self.hierarchy, *x.shape[1:]), like))

        def device(*xs: Any) -> list[Any]:
            coords = [jax.lax.axis_index(n) for n in self.names]
            out = self.body(coords, *(x.reshape(x.shape[k:]) for x in xs))
            return [y.reshape((1,) * k + y.shape) for y in out]

        mesh = Mesh(devices, self.names)
        mapped = jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        program = jax.jit(mapped).lower(*stacked).compile({"xla_backend_optimization_level": 0})
        sent, said = read_compiled(program).wire_bytes, sum(t.wire_bytes for t in self.communication)
        assert abs(sent - said) <= 0.01 * said, f"{sent} bytes are sent, the rule says {said}"
        results = [to_numpy(y) for y in program(*stacked)]
        return [{c: y[c] for c in places} for y in results]

    def problem(
        self, shards: Sequence[view.Shards], close: float, results: Sequence[Any] | None = None
    ) -> str | None:
        """What is wrong with the results, if anything; `results` are those of one device."""
        results = self.app.results if results is None else results
        for i, got in enumerate(self.run(shards)):
            want, layout = to_numpy(results[i]), self.results[i]
            words = want.shape[len(layout.shape) :]
            shapes = {x.shape for x in got.values()}
            if shapes != {layout.local + words}:
                return f"result {i}: local shapes {shapes}, not {layout.local + words}"
            if {x.dtype for x in got.values()} != {want.dtype}:
                return f"result {i}: dtypes {[x.dtype for x in got.values()]}, not {want.dtype}"
            try:
                joined = view.join(got, want.shape, layout.nd, self.hierarchy)
            except ValueError as e:
                return f"result {i}: {e}"
            if not same(joined, want, close):
                return f"result {i}: got\n{joined}\nwant\n{want}\nfrom\n{got}"
        return None


def same(got: Array, want: Array, close: float) -> bool:
    """Equal, NaN where NaN is wanted; floats up to `close`."""
    if want.dtype.kind in "biu" or not want.size:
        return np.array_equal(got, want)
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    return np.allclose(got.astype(wide), want.astype(wide), rtol=close, atol=close, equal_nan=True)


def describe(ins: Sequence[Any], outs: Sequence[Any]) -> str:
    """A row as text."""
    return ", ".join(map(str, ins)) + " -> " + ", ".join(map(str, outs))


def false_rows(one: Sample, groups: Sequence[int]) -> list[str]:
    """The 1-D rows of a sample that are not true on axes of the given sizes."""
    wrong = []
    for app in applications(one):
        values = [to_numpy(x) for x in app.operands]
        for group in groups:
            op = app.op([x.shape for x in app.operands], [x.shape for x in app.results], group)
            for row in valid_rows(lookup(one.name), op):
                # Without a split the shards have one shape, whatever the group.
                if group == groups[0] or has_split(row):
                    wrong += _false_row(app, values, row, group, one.close)
    return wrong


def has_split(row: Row) -> bool:
    """Whether the row cuts anything."""
    return any(isinstance(s, Split) for s in (*row.operands, *row.results))


def _false_row(app: Application, values: Sequence[Array], row: Row, group: int, close: float) -> list[str]:
    where = f"group {group}: {describe(row.operands, row.results)}"
    try:
        claim = Claim(app, [(s,) for s in row.operands], [(s,) for s in row.results], (group,))
        found = [claim.problem(shards, close) for shards in variants(values, row, group)]
        bad = next((f for f in found if f), None) or special_problem(claim, row, close)
    except Exception as e:
        bad = f"{type(e).__name__}: {e}"
    return [f"{where}: {bad}"] if bad else []


def compositions(app: Application, hierarchy: Sequence[int]) -> list[tuple[Row, ...]]:
    """Every choice of one row per axis, outer to inner, on the shapes that remain."""
    start = ([x.shape for x in app.operands], [x.shape for x in app.results])
    done: list[tuple[tuple[Row, ...], Any]] = [((), start)]
    for group in hierarchy:
        grown = []
        for rows, (ins, outs) in done:
            for row in valid_rows(lookup(app.node.op), app.op(ins, outs, group)):
                left = [split_shape(n, s, group) for n, s in zip(ins, row.operands, strict=True)]
                right = [split_shape(n, s, group) for n, s in zip(outs, row.results, strict=True)]
                grown.append(((*rows, row), (left, right)))
        done = grown
    return [rows for rows, _ in done]


def false_compositions(one: Sample, hierarchy: tuple[int, ...]) -> list[str]:
    """The N-D signatures, among a seeded choice of those that the rows compose to, that are not true."""
    wrong = []
    for app in applications(one):
        values = [to_numpy(x) for x in app.operands]
        found = [rows for rows in compositions(app, hierarchy) if all(map(has_split, rows))]
        for rows in random.Random(f"{one} {hierarchy}").sample(found, min(one.pairs, len(found))):
            ins = list(zip(*(r.operands for r in rows), strict=True))
            outs = list(zip(*(r.results for r in rows), strict=True))
            try:
                bad = Claim(app, ins, outs, hierarchy).problem(scattered(values, ins, hierarchy), one.close)
            except Exception as e:
                bad = f"{type(e).__name__}: {e}"
            wrong += [f"{hierarchy}: {describe(ins, outs)}: {bad}"] if bad else []
    return wrong
