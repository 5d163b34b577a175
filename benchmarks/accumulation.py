"""A GPT and a Llama with 1 and 8 micro-batches: jit, jit in explicit mode ported by hand, and sbp, compiled.

    python -m benchmarks.accumulation [--rows gpt/data:8,llama/2d:2x4,...] [--microbatches 1,8] [--kind cpu]
                                      [--small] [--seconds 20] [--json FILE]

Columns: `jax.jit` with NamedShardings (Auto axes); the port of benchmarks/explicit.py with what JAX asks for,
and the best one, whose gradients wait as sums; the single-device program through sbp; both ports through sbp,
unchanged; and the best port through sbp under a limit on memory, where it takes more than by itself. Per
column: wire MB per device and step, instructions that are collectives (a loop's body counts once), and MB at
the peak, arguments included. With `--kind h100` they are compiled for GPUs that are not here (extra
gpu-target); XLA on CPU has no reduce-scatter, so that there peers add up gradients whole that are split.
With `--seconds`, on CPUs, steps of jit, of the best port and of sbp are timed too, interleaved: ratios to
those of the best port, and of its twin.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import sbp
from benchmarks import explicit, explicit_llama
from benchmarks.versus_jax import Loop, interleave, median_ratio
from models import gpt, llama, train
from models.pipeline import Pipeline
from sbp.compat.untyped import struct
from sbp.errors import MemoryLimitError
from sbp.notation.resolve import resolve, to_partition_spec
from sbp.runtime.hlo.meter import each_collective, read_compiled, text_of
from sbp.runtime.hlo.parser import parse
from sbp.runtime.target.devices import absent_mesh

LAYOUTS = ("data:8", "fsdp:8", "tensor:8", "2d:2x4")
ROWS = ",".join(f"{model}/{layout}" for model in ("gpt", "llama") for layout in LAYOUTS)
MICROBATCHES = "1,8"
Config: TypeAlias = gpt.Config | llama.Config
SIZES: dict[str, Config] = {
    "gpt": gpt.Config(width=256, heads=8, vocabulary=1024, sequence=128, dropout=0.0),
    "llama": llama.Config(width=256, heads=8, kv_heads=8, hidden=768, vocabulary=1024, sequence=128),
}
SMALL: dict[str, Config] = {
    "gpt": gpt.Config(width=32, heads=8, vocabulary=64, sequence=16, dropout=0.0),
    "llama": llama.Config(width=32, heads=8, kv_heads=8, hidden=64, vocabulary=64, sequence=16),
}
BATCH = 64
BEST, OF_BEST = "explicit, best", "sbp of the best port"
COLUMNS = ("jit", "explicit", BEST, "sbp", "sbp of the port", OF_BEST, f"{OF_BEST}, in its memory")
TRIES = 4
"""Limits on memory, each lower by what XLA's program took above the one before."""
OURS = {"fsdp": "zero"}
"""What a layout is called in `models.parallel`, where that is another name."""


@dataclass(frozen=True, slots=True)
class XlaExecutable:
    """What XLA made of one step; see the module."""

    wire_bytes: float
    collectives: int
    peak_bytes: float

    def __str__(self) -> str:
        return f"{self.wire_bytes / 1e6:.2f} MB, {self.collectives}, {self.peak_bytes / 1e6:.1f} MB"


def of(exe: Any) -> XlaExecutable:
    """What an executable is."""
    found = list(each_collective(parse(text_of(exe))))
    memory = exe.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
    return XlaExecutable(read_compiled(exe).wire_bytes, len(found), peak)


@dataclass(frozen=True)
class Row:
    """A layout and a number of micro-batches.

    Arguments:
      model: "gpt" or "llama".
      layout: of `explicit.Port`.
      shape: of the placement, whose axes the port names.
    """

    model: str
    layout: str
    shape: tuple[int, ...]
    microbatches: int
    kind: str
    config: Any

    def __str__(self) -> str:
        return f"{self.model}/{self.layout}:{'x'.join(map(str, self.shape))}, {self.microbatches}"

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW."""
        return optax.adamw(1e-3)

    @property
    def placement(self) -> sbp.Placement:
        """Where it runs."""
        axes = explicit.Port(self.layout).axes
        return sbp.placement(self.kind, shape=self.shape, axes=axes)

    def mesh(self, kind: AxisType) -> Mesh:
        """The peers' mesh."""
        placement = self.placement
        mesh = placement.mesh if self.kind == "cpu" else absent_mesh(placement)
        return Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * placement.ndim)

    @property
    def home(self) -> Any:
        """The module of the model."""
        return {"gpt": gpt, "llama": llama}[self.model]

    def step(self) -> Callable[..., Any]:
        """The single-device program."""
        loss = partial(self.home.loss, config=self.config)
        return train.gradient_step(loss, self.optimizer, Pipeline(microbatches=self.microbatches))

    def port(self, best: bool) -> tuple[explicit.Port, Callable[..., Any]]:
        """The port, and its step."""
        port: explicit.Port
        size, config = self.shape[0], self.config
        if self.model == "gpt":
            port = explicit.Port(self.layout, best)
            loss = partial(explicit.loss, config=config, port=port)
        else:
            port = explicit_llama.LlamaPort(self.layout, best)
            loss = partial(explicit_llama.loss, config=config, port=port, size=size)
        return port, explicit.make_train_step(loss, self.optimizer, port, size, self.microbatches)

    def values(self) -> tuple[Any, ...]:
        """The arguments."""
        params = self.home.init(jax.random.key(0), self.config)
        shape = (BATCH, self.config.sequence + 1)
        tokens = np.random.default_rng(0).integers(0, self.config.vocabulary, shape).astype(np.int32)
        return params, self.optimizer.init(params), tokens, jax.random.key(1)

    def shapes(self) -> tuple[Any, ...]:
        """The arguments, without values."""
        params = jax.eval_shape(partial(self.home.init, config=self.config), jax.random.key(0))
        tokens = struct((BATCH, self.config.sequence + 1), jnp.int32)
        return params, jax.eval_shape(self.optimizer.init, params), tokens, jax.eval_shape(jax.random.key, 1)

    def in_sbp(self) -> Any:
        """How they lie, as signatures."""
        choice = OURS.get(self.layout, self.layout)
        return self.home.signatures(choice, self.shape, self.config, self.optimizer)

    def specs(self, port: explicit.Port) -> Any:
        """How they lie in the port, a spec per leaf; the optimizer's state as the weights that it is of."""
        params, state, _, _ = self.shapes()
        weights = port.weights(params, self.shape[0])
        like = {x.shape: s for x, s in zip(jax.tree.leaves(params), jax.tree.leaves(weights), strict=True)}
        return weights, jax.tree.map(lambda x: like.get(x.shape, Spec()), state), Spec(port.batch), Spec()

    def lying(self, mesh: Mesh, specs: Any) -> Any:
        """The arguments with shardings."""
        return jax.tree.map(
            lambda x, s: struct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)), self.shapes(), specs
        )


def jit_specs(row: Row) -> Any:
    """What jit is told of the arguments: the same as sbp."""
    flat, tree = jax.tree.flatten(row.shapes())
    found, problems = resolve(row.in_sbp(), row.shapes(), ["argument"] * len(flat), row.placement, "in_sbp")
    assert not problems, problems
    whole = (sbp.B,) * row.placement.ndim
    named = [to_partition_spec(nd or whole, x.ndim, row.placement) for nd, x in zip(found, flat, strict=True)]
    return jax.tree.unflatten(tree, named)


def jitted(row: Row, step: Callable[..., Any], args: Any) -> Any:
    """A step through `jax.jit`, compiled."""
    outs = jax.tree.map(lambda x: x.sharding, args[:2])
    traced = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*outs, None)).trace(*args)
    platforms = None if row.kind == "cpu" else ("cuda",)
    return traced.lower(lowering_platforms=platforms).compile()


def peers(row: Row) -> Iterator[tuple[str, Any]]:
    """The columns of JAX: a name, and what is compiled."""
    yield COLUMNS[0], jitted(row, row.step(), row.lying(row.mesh(AxisType.Auto), jit_specs(row)))
    mesh = row.mesh(AxisType.Explicit)
    for name, best in zip(COLUMNS[1:3], (False, True), strict=True):
        port, step = row.port(best)
        args = row.lying(mesh, row.specs(port))
        with jax.set_mesh(mesh):
            yield name, jitted(row, step, args)


def ported(row: Row, best: bool, limit_bytes: float | None = None) -> Any:
    """A port through sbp, compiled."""
    (port, step), shapes = row.port(best), row.shapes()
    options = sbp.Options(memory_limit=limit_bytes)
    program = sbp.compile(step, row.placement, in_sbp=row.specs(port), donate_argnums=(0, 1), options=options)
    # The port asks for axes by their names: any mesh that has them will do.
    with jax.sharding.use_abstract_mesh(row.mesh(AxisType.Explicit).abstract_mesh):
        lowered = program.lower(*shapes)
    return lowered.compile()


def columns(row: Row) -> dict[str, XlaExecutable]:
    """All columns of a row."""
    found = {name: of(exe) for name, exe in peers(row)}
    program = sbp.compile(row.step(), row.placement, in_sbp=row.in_sbp(), donate_argnums=(0, 1))
    found[COLUMNS[3]] = of(program.lower(*row.shapes()).compile())
    found[COLUMNS[4]], found[OF_BEST] = (of(ported(row, best)) for best in (False, True))
    limit = room = found[BEST].peak_bytes
    last = found[OF_BEST]
    for _ in range(TRIES):
        if last.peak_bytes <= room:
            break
        try:
            last = of(ported(row, True, limit))
        except MemoryLimitError:  # what the port asks for does not fit
            break
        limit *= room / last.peak_bytes
    found[COLUMNS[-1]] = last
    return found


def step_ratios(row: Row, seconds: float) -> dict[str, float]:
    """Steps as ratios to those of the best port, interleaved."""
    exes = dict(peers(row))
    program = sbp.compile(row.step(), row.placement, in_sbp=row.in_sbp(), donate_argnums=(0, 1))
    names = {"jit": exes["jit"], "twin": exes[BEST], BEST: exes[BEST]}
    loops = [Loop(exe, jax.device_put(row.values(), exe.input_shardings[0])) for exe in names.values()]
    loops.append(Loop(program, program.place(*row.values())))
    *rest, best, own = interleave(loops, seconds)
    return {n: median_ratio(x, best) for n, x in zip(("jit", "twin", "sbp"), (*rest, own), strict=True)}


def rows_of(text: str, microbatches: str, kind: str, sizes: Mapping[str, Config]) -> list[Row]:
    """The rows that an option names."""
    out = []
    for entry in text.split(","):
        model, _, rest = entry.partition("/")
        layout, _, shape = rest.partition(":")
        devices, config = tuple(map(int, shape.split("x"))), sizes[model]
        out += [Row(model, layout, devices, int(n), kind, config) for n in microbatches.split(",")]
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.accumulation", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--microbatches", default=MICROBATCHES)
    parser.add_argument("--kind", default="cpu", help="cpu, or h100, which need not be here")
    parser.add_argument("--small", action="store_true", help="of a width of 32 only")
    parser.add_argument("--seconds", type=float, default=0, help="of timed steps per row")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"| layout, micro-batches | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}")
    found: dict[str, dict[str, XlaExecutable]] = {}
    steps: dict[str, dict[str, float]] = {}
    sizes = SMALL if options.small else SIZES
    for row in rows_of(options.rows, options.microbatches, options.kind, sizes):
        found[str(row)] = columns(row)
        print(f"| {row} | {' | '.join(map(str, found[str(row)].values()))} |", flush=True)
        if options.seconds:
            steps[str(row)] = step_ratios(row, options.seconds)
    for name, ratios in steps.items():
        print(name, *(f"{n} {ratio:.2f}" for n, ratio in ratios.items()))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as f:
            rows = {r: {n: asdict(c) for n, c in cs.items()} for r, cs in found.items()}
            json.dump({"rows": rows, "steps": steps} if steps else {"rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
