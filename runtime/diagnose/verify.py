"""`verify`: the distributed program against the function on one device, down to the first op that differs.

Tensors inside a distributed program, fetched by running it with other results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from sbp.compat import core
from sbp.compat.mesh import user_mesh
from sbp.compat.untyped import DType, Leaf
from sbp.errors import MismatchError, Problem
from sbp.hardware.catalogue import hardware_for
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import Move
from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain.internal_errors import public
from sbp.passes.physical.program import Box, Physical, Step, reads, writes
from sbp.passes.program.graph import Const, Graph, Node
from sbp.runtime.call.binding import Call
from sbp.runtime.compile.compilation import P, R
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.lower.lowering import lower, shardings
from sbp.runtime.lower.reference_interpreter import Tensor, evaluate
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.processes.addressable import moved_to
from sbp.runtime.program.program import Program
from sbp.signature import B, NdSbp, Partial, Split, format_sbp

# Relative to the largest magnitude of the tensor, by item size in bytes; integers and booleans must be equal.
TOLERANCE = {2: 2e-2, 4: 1e-4, 8: 1e-9, 16: 1e-9}


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found equal.

    Arguments:
      outputs: how many results were compared.
      largest: the largest difference, relative to the largest magnitude of its tensor.
    """

    outputs: int
    largest: float

    def __str__(self) -> str:
        return f"{self.outputs} results equal one device's; largest relative difference {self.largest:.1e}"


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two arrays, relative to the larger magnitude; 0.0 where equal or both NaN."""
    if core.is_key(a.dtype):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    x, y = np.asarray(a), np.asarray(b)
    if not x.size:
        return 0.0
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return float((x != y).any())
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    if same.all():
        return 0.0
    finite = np.isfinite(x) & np.isfinite(y)
    if not (finite | same).all():
        return float("inf")
    scale = max(float(np.abs(y[finite]).max(initial=0.0)), np.finfo(np.float64).tiny)
    return float(np.abs(x - y)[finite].max()) / scale


def limit(dtype: DType) -> float:
    """The difference that rounding in another order can make."""
    if core.is_key(dtype) or not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return TOLERANCE[max(2, int(dtype.itemsize))]


@public
def verify(program: Program[P, R], *args: P.args, **kwargs: P.kwargs) -> Report:
    """Runs the function on one device and the distributed program, and compares every result.

    Arguments:
      program: made by `sbp.compile`.
      args, kwargs: the arguments of one call; donated ones are copied first.

    Raises:
      MismatchError: if a result differs; it names the first op whose own result differs.
    """
    call, built = program._prepare(args, kwargs, concrete=True)
    host = [_to_host(x) for x in call.leaves]
    expected = _plain(program, call, host)
    if isinstance(built, CompiledPipeline):
        got: Sequence[jax.Array] = jax.tree.leaves(built.run([_to_host(x) for x in host]))
    else:
        jitted, _, consts = built.executable
        placed = built.place([_to_host(x) for x in host])
        got = jitted(*placed, *consts)[: len(expected)]  # behind them stands what is counted
    errors = [_apart(out, plain) for out, plain in zip(got, expected, strict=True)]
    for k, (plain, error) in enumerate(zip(expected, errors, strict=True)):
        if error > limit(plain.dtype):
            raise MismatchError(_cause(built, host, k, plain, error))
    return Report(len(errors), max(errors, default=0.0))


def _plain(program: Program[P, R], call: Call, host: Sequence[Leaf]) -> list[jax.Array]:
    """The results of the user's own function under `jax.jit`, without anything of the compiler's."""

    def run(*leaves: Leaf) -> list[jax.Array]:
        dynamic, kwargs = call.trace_args(leaves)
        out = program.fn(*call.full(dynamic), **kwargs, **call.static_kwargs)
        return [jnp.asarray(x) for x in jax.tree.leaves(out)]

    with user_mesh(to_run=True):
        return list(jax.jit(run)(*map(_to_host, host)))


def _apart(out: jax.Array, plain: jax.Array) -> float:
    """The difference of two results; infinite if they are not alike in shape and type."""
    return difference(out, plain) if (out.shape, out.dtype) == (plain.shape, plain.dtype) else float("inf")


def _cause(
    built: CompiledProgram | CompiledPipeline, host: Sequence[Leaf], k: int, plain: jax.Array, error: float
) -> Problem:
    """Why result `k` differs: the trace itself, or the first op that ran otherwise."""
    path, graph = built.traced.out_paths[k], built.traced.graph
    x = graph.outputs[k]
    traced = jnp.asarray(x.value, x.dtype) if isinstance(x, Const) else _one_device(graph, host, [x])[x]
    off = _apart(traced, plain)
    if off > limit(plain.dtype):
        return _wrong_trace(path, off)
    if isinstance(built, CompiledPipeline):
        return _unnamed(built, path, error)
    return _first_difference(built, host, path, error)


def _wrong_trace(path: str, error: float) -> Problem:
    """Of a program whose logical graph does not compute what the function does."""
    return Problem(
        "mismatch",
        f"{path} differs, and the trace differs",
        f"a relative difference of {error:.1e} before anything is split",
        "the same numbers as the function itself under jax.jit, up to rounding",
        "the graph that was read from the function computes something else: no op of the plan is to blame",
        "if the function gives the same numbers every time, this is a bug in the compiler: please report it",
    )


def _to_host(x: Leaf) -> Leaf:
    """A copy that no device owns: it can be donated, and given to any program."""
    if not hasattr(x, "dtype"):
        return x
    if core.is_key(x.dtype):
        words = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return np.array(x)


def _one_device(graph: Graph, host: Sequence[Leaf], wanted: Sequence[int]) -> dict[int, jax.Array]:
    """The values of some tensors, by the logical graph on the first device."""

    def run(*inputs: jax.Array) -> list[Tensor]:
        return evaluate(graph.nodes, dict(zip(graph.inputs, inputs, strict=True)), wanted)

    return dict(zip(wanted, jax.jit(run)(*host, *graph.consts), strict=True))


def _first_difference(built: CompiledProgram, host: Sequence[Leaf], path: str, error: float) -> Problem:
    """Names the first op, in the order of the graph, whose distributed value differs."""
    graph = built.traced.graph
    for nodes in _chunks(graph):
        values = [v for node in nodes for v in node.outputs]
        expected = _one_device(graph, host, values)
        got = dict(zip(values, probe(built, [*host, *graph.consts], values), strict=True))
        for node in nodes:
            for v in node.outputs:
                bad = difference(got[v], expected[v])
                if bad > limit(graph.values[v].dtype):
                    return _problem(built, node, v, path, error, bad)
    return Problem(
        "mismatch",
        path,
        f"a relative difference of {error:.1e}",
        "the same numbers as on one device, up to rounding",
        "no single op differs beyond rounding: the differences add up",
        "compare under jax_enable_x64, which separates rounding from bugs",
    )


def _unnamed(built: CompiledPipeline, path: str, error: float) -> Problem:
    """Of a program with stages, the result that differs."""
    stages = ", ".join(map(str, built.stages.where.placements))
    return Problem(
        "mismatch",
        path,
        f"a relative difference of {error:.1e}",
        "the same numbers as on one device, up to rounding",
        f"the program runs on {stages}; ops are named only in programs of one placement",
        "verify the function without sbp.on, on one of them",
    )


def _chunks(graph: Graph) -> Iterator[list[Node]]:
    nodes = list(graph.nodes)
    yield from (nodes[i : i + CHUNK] for i in range(0, len(nodes), CHUNK))


def _problem(built: CompiledProgram, node: Node, v: int, path: str, error: float, bad: float) -> Problem:
    physical = built.plan.physical
    assert physical is not None
    used = next(s for s in physical.steps if not isinstance(s, Box) and v in s.node.outputs)
    ins = ", ".join(format_sbp(nd) for _, nd in reads(used)) or "scalars"
    outs = ", ".join(format_sbp(nd) for _, nd in writes(used))
    return Problem(
        "mismatch",
        f"{path} differs; the first op that differs is {node.op} at {node.source}",
        f"a relative difference of {bad:.1e} in {built.traced.graph.values[v]} ({error:.1e} in the result)",
        "the same numbers as on one device, up to rounding",
        f"it ran as {ins} -> {outs} on {physical.placement}",
        "if the op's rule is yours, check its rows; else this is a bug in the compiler: please report it",
    )


CHUNK = 200
"""Tensors that are fetched at once."""


def probe(built: CompiledProgram, inputs: Sequence[Tensor], values: Sequence[int]) -> list[jax.Array]:
    """The values of some tensors, gathered.

    Arguments:
      inputs: the leaves of the arguments, then the arrays that the function closes over.
    """
    physical = built.plan.physical
    assert physical is not None
    probed = with_outputs(physical, values)
    mesh = probed.placement.mesh
    ins, _ = shardings(probed, mesh)
    return list(lower(probed, mesh, ())(*moved_to(list(inputs), ins)))


def with_outputs(physical: Physical, values: Sequence[int]) -> Physical:
    """The same program with other results: `values`, each brought to B right after it is made."""
    graph, placement = physical.graph, physical.placement
    wanted, whole = set(values), (B,) * placement.ndim
    boxings = Boxings(Network(placement, hardware_for(placement.kind)))
    steps: list[Step] = []
    for step in physical.steps:
        steps.append(step)
        if not isinstance(step, Box):
            for v, nd in writes(step):
                if v in wanted:
                    steps += [Box(v, m, -1) for m in _gather(boxings, graph, v, nd, whole)]
    outputs = tuple(whole for _ in values)
    return replace(physical, graph=replace(graph, outputs=tuple(values)), steps=tuple(steps), outputs=outputs)


def _gather(boxings: Boxings, graph: Graph, v: int, nd: NdSbp, whole: NdSbp) -> tuple[Move, ...]:
    value = graph.values[v]
    partials = frozenset(s.op for s in nd if isinstance(s, Partial))
    dims = {s.dim for s in nd if isinstance(s, Split)} | {d for d, n in enumerate(value.shape) if n > 1}
    return boxings.of(value.shape, value.dtype, partials, tuple(sorted(dims))).path(nd, whole)
