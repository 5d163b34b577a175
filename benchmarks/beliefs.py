"""What XLA's scheduler takes products and collectives to be, beside what sbp/rates/beliefs.py says of it.

    python -m benchmarks.beliefs [--out benchmarks/results/beliefs.json]
    python -m benchmarks.beliefs --show benchmarks/results/beliefs.json
    python -m benchmarks.beliefs --batched h100,b200 [--out sbp/rates/batched.csv]

Products and collectives of many shapes are compiled for GPUs that are not here (the extra gpu-target), and
XLA prints what its latency estimator says of each (TF_CPP_VMODULE). With `--batched`: the rates that it has
of several products at once, at the shapes of its table, k not split.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import sbp
from sbp.rates.beliefs import Product, believed_collective_seconds, believed_product_seconds, parts_of
from sbp.rates.chips import CHIPS
from sbp.runtime.target.devices import absent_mesh

LOGGED: Mapping[str, str] = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "sol_latency_estimator=10"}
"""What makes XLA print them; read when its plugin is loaded."""
PRODUCT = re.compile(r"NodeCost: Matmul cost from matmul_interpolator for (\S+): (\S+) us")
COLLECTIVE = re.compile(r"GetLatencyBetween: Computed collective time for (\S+): (\S+) us")
UNKNOWN = re.compile(r"ComputeCollectiveTime failure for (\S+), returning latency: (\S+)")

TYPES = (("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16"))
"""Of operands and results."""
SHAPES = (
    *itertools.product((1,), (512, 1024, 8192), (1024, 3000), (512, 1024, 8192, 65536)),
    *((1, 8192, 51200, 1024), (1, 1024, 51200, 8192), (1, 768, 768, 4096), (1, 1000, 3000, 5000)),
    *((2, 1024, 1024, 8192), (3, 500, 700, 900), (16, 2048, 2048, 128), (64, 128, 128, 4096)),
    *((128, 1024, 1024, 64), (128, 1024, 64, 1024)),
)
"""[batch, m, n, k]"""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
WHERE = (
    *(((8,), (0,)), ((2, 4), (0,)), ((2, 4), (1,)), ((16, 8), (0,)), ((16, 8), (0, 1)), ((4, 4, 8), (1,))),
    *(((8, 128), (1,)), ((16, 64), (1,))),
)
"""Placements, and the axes over which is sent; the last two are several groups of whole hosts."""
ELEMENTS = (4096, 98_304, 6_291_456)
"""Of float32, the tensor of one device."""
GRID = tuple(256 << i for i in range(5))


@dataclass(frozen=True, slots=True)
class Believed:
    """What XLA said.

    Arguments:
      what: the kind of a collective, or "product".
      sizes: of a product [batch, m, n, k] and the parts of k, of a collective the bytes of the whole tensor.
      types: of the operands and the result of a product.
      shape, axes: of a collective, the placement, and over which of its axes is sent.
    """

    what: str
    sizes: tuple[int, ...]
    microseconds: float
    types: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()

    def ours(self, chip: str) -> tuple[float, int]:
        """What `sbp.rates.beliefs` says: microseconds, and into how many parts k is split."""
        if self.what == "product":
            (*sizes, _), (operands, result) = self.sizes, self.types
            itemsizes = jnp.dtype(operands).itemsize, jnp.dtype(result).itemsize
            product = Product(*sizes, operands, result, *itemsizes)
            parts, seconds = parts_of(CHIPS[chip], product), believed_product_seconds(chip, product)
            return 1e6 * (seconds - adding_seconds(chip, product, parts)), parts
        placement = sbp.placement(chip, shape=self.shape)
        groups = [[int(r) for r in g] for g in placement.groups(self.axes)]
        return 1e6 * believed_collective_seconds(CHIPS[chip], self.what, self.sizes[0], groups), 1


def adding_seconds(chip: str, product: Product, parts: int) -> float:
    """Of the kernel that adds up the parts of a product, which XLA lists by itself."""
    each = parts * product.sum_bytes + product.result_bytes
    moved = product.batch * product.m * product.n * each if parts > 1 else 0
    return moved / CHIPS[chip].memory_bytes_per_second


@contextmanager
def logged() -> Iterator[Any]:
    """A file that has what the process prints as errors meanwhile."""
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def compiled(fn: Callable[..., Any], args: Any, placement: sbp.Placement, **options: Any) -> tuple[str, str]:
    """The text of a program that every device runs on all of its arguments, and what XLA printed of it."""
    mesh = absent_mesh(placement)
    whole = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
    spec = PartitionSpec()
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    lowered = jax.jit(sharded).trace(*args).lower(lowering_platforms=("cuda",))
    with logged() as file:
        text = lowered.compile(options).as_text()
        file.seek(0)
        return text, file.read()


def said(log: str) -> dict[str, float]:
    """By the name of the instruction: microseconds."""
    return {m[1]: float(m[2]) for of in (PRODUCT, COLLECTIVE, UNKNOWN) for m in of.finditer(log)}


def products(
    chip: str, cases: Sequence[tuple[tuple[int, ...], tuple[str, str]]], **options: Any
) -> list[Believed]:
    """Products, each with what its kernel is to XLA.

    Arguments:
      cases: [batch, m, n, k], and the types of operands and results.
      options: of the compiler.
    """
    placement = sbp.placement(chip, shape=(2,))
    args = [
        tuple(jax.ShapeDtypeStruct(s, operands) for s in ((b, m, k), (b, k, n)))
        for (b, m, n, k), (operands, _) in cases
    ]

    def every(pairs: Any, sent: Any) -> Any:
        found = []
        for i, ((x, y), (_, (_, result))) in enumerate(zip(pairs, cases, strict=True)):
            with jax.named_scope(f"case{i}_"):
                one = lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))), preferred_element_type=result)
            found.append(one)
        return found, lax.psum(sent, placement.axes)  # nothing is scheduled where nothing is sent

    args = (args, jax.ShapeDtypeStruct((4096,), jnp.float32))
    text, log = compiled(every, args, placement, **options)
    times, found = said(log), dict[int, Believed]()
    for name, i, made in kernels(text):
        (b, m, n, k), types = cases[i]
        if name in times:
            found[i] = Believed("product", (b, m, n, k, made // (b * m * n)), times[name], types)
    return list(found.values())


def kernels(text: str) -> Iterator[tuple[str, int, int]]:
    """Of each fusion around a product: its name, the case that it is, and the elements that the product
    gives."""
    inside = dict[str, tuple[int, int]]()
    body = ""
    for line in text.splitlines():
        if (begins := re.match(r"%(\S+) \(.*\{$", line)) is not None:
            body = begins[1]
        elif " dot(" in line and (case := re.search(r"case(\d+)_/", line)) is not None:
            dims = re.search(r"= \w+\[([\d,]*)\]", line)
            assert dims is not None
            inside[body] = int(case[1]), math.prod(map(int, dims[1].split(",")))
    for name, called in re.findall(r"%(\S+) = \S+ fusion\(.*calls=%([\w.\-]+)", text):
        if called in inside:
            yield name, *inside[called]


def collectives(chip: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> list[Believed]:
    """Collectives one after another, each with what it is to XLA."""
    placement = sbp.placement(chip, shape=shape)
    over = tuple(placement.axes[a] for a in axes)
    ranks = math.prod(shape[a] for a in axes)
    cases = list(itertools.product(COLLECTIVES, ELEMENTS))

    def every(xs: Any) -> Any:
        found = list[Any]()
        for x, (kind, _) in zip(xs, cases, strict=True):
            # Each waits for the one before it, so that none are sent as one.
            found.append(SENT[kind](x + found[-1].ravel()[0] if found else x, over, ranks))
        return found

    args = [jax.ShapeDtypeStruct((n // ranks * ranks,), jnp.float32) for _, n in cases]
    text, log = compiled(every, (args,), placement)
    times = said(log)
    # In their order; where no kernel runs beside one, its name ended with the schedule.
    names = [n for n in dict.fromkeys(re.findall(r'scheduling_name="([^"]+)"', text)) if n in times]
    assert len(names) == len(cases), (len(names), len(cases))
    found = []
    for name, (kind, _), x in zip(names, cases, args, strict=True):
        size = 4 * x.size * (ranks if kind == "all_gather" else 1)
        found.append(Believed(kind, (size,), times[name], (), shape, axes))
    return found


def _permuted(x: Any, over: tuple[str, ...], ranks: int) -> Any:
    return lax.ppermute(x, over, [(i, (i + 1) % ranks) for i in range(ranks)])


SENT: Mapping[str, Callable[[Any, tuple[str, ...], int], Any]] = {
    "all_reduce": lambda x, over, ranks: lax.psum(x, over),
    "all_gather": lambda x, over, ranks: lax.all_gather(x, over, tiled=True),
    "reduce_scatter": lambda x, over, ranks: lax.psum_scatter(x, over, tiled=True),
    "all_to_all": lambda x, over, ranks: lax.all_to_all(x, over, 0, 0, tiled=True),
    "permute": _permuted,
}


def batched(chip: str) -> Iterator[str]:
    """Lines of sbp/rates/batched.csv."""
    for operands, batch in itertools.product(("bfloat16", "float32"), (2, 4)):
        sizes = [(batch, *dims) for dims in itertools.product(GRID, repeat=3)]
        cases = [(size, (operands, operands)) for size in sizes]
        found = products(chip, cases, xla_gpu_experimental_force_split_k=1)
        times = {x.sizes[:4]: x.microseconds for x in found}
        name = {"bfloat16": "bf16", "float32": "f32"}[operands]
        for m, n in itertools.product(GRID, repeat=2):
            rates = [2e-6 * batch * m * n * k / times[batch, m, n, k] for k in GRID]
            yield ",".join([CHIPS[chip].tables, name, f"{batch},{m},{n}", *(f"{x:.5g}" for x in rates)])


def read(file: Path) -> list[Believed]:
    """What was recorded."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    return [Believed(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows]


def table(rows: Sequence[Believed], chip: str) -> str:
    """XLA's figures beside ours, as Markdown."""
    lines = ["| | XLA us | ours us | ratio | parts: XLA | ours |", "|---|---|---|---|---|---|"]
    ratios = []
    for x in rows:
        microseconds, parts = x.ours(chip)
        ratios.append(microseconds / x.microseconds)
        made = x.sizes[4] if x.what == "product" else 1
        where = f" over {x.axes} of {x.shape}" if x.shape else ""
        name = f"{x.what} {'x'.join(map(str, x.sizes[:4]))} {' -> '.join(x.types)}{where}"
        times = (f"{t:.2f}" for t in (x.microseconds, microseconds, ratios[-1]))
        lines.append("| " + " | ".join([name, *times, str(made), str(parts)]) + " |")
    apart = [abs(math.log(r)) for r in ratios]
    median, most = statistics.median(apart), max(apart)
    lines.append(f"\n{len(rows)} beliefs, apart by {median:.2%} in the median, {most:.1%} at most")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.beliefs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for what was found")
    parser.add_argument("--show", type=Path, help="compile nothing: the table of such a file")
    parser.add_argument("--batched", metavar="CHIPS", help="rates of several products at once, as CSV")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(LOGGED)
    if options.batched is not None:
        head = ",".join(["table,operands,batch,m,n", *(f"tflops_k{k}" for k in GRID)])
        lines = [head, *itertools.chain(*(batched(chip) for chip in options.batched.split(",")))]
        (options.out.write_text if options.out else sys.stdout.write)("\n".join(lines) + "\n")
        return
    rows = [] if options.show is None else read(options.show)
    if not rows:
        rows = products("h100", list(itertools.product(SHAPES, TYPES)))
        rows += [x for shape, axes in WHERE for x in collectives("h100", shape, axes)]
        if options.out is not None:
            text = ",\n".join(json.dumps({k: v for k, v in asdict(x).items() if v != ()}) for x in rows)
            options.out.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    print(table(rows, "h100"))


if __name__ == "__main__":
    main()
