"""What the devices of this machine do: `calibrate` measures them, for a `Hardware` of one's own.

Everything is measured on all devices at once, as programs run: forced CPU devices share their cores. What is
timed is done again and again inside one program, in a loop that XLA does not fuse, so that its launch does
not count; the best of several runs is kept.

What `calibrate` found out, as a table to read and as the TOML file that plans are made with.
"""

import datetime
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from scipy.optimize import nnls

from sbp.compat.untyped import (
    JaxDevice,
    all_gather,
    all_to_all,
    block_until_ready,
    optimization_barrier,
    partition_spec,
    ppermute,
    psum,
    psum_scatter,
)
from sbp.errors import PlacementError, Problem
from sbp.hardware.catalogue import ANY, Hardware, Link
from sbp.hardware.file import ITEMS, hardware_text
from sbp.rates.collectives import KINDS
from sbp.rates.tables import CollectiveCurve, rise_monotonically
from sbp.text.units import bytes_text, seconds_text

NO_LINKS = """\
One device was measured, so nothing is known of links. Plans need them: remove the # and give your figures.
[[links]]
devices = 8
bytes_per_second = "450 GB/s"
latency_seconds = "10 us"

[[links]]
bytes_per_second = "400 Gb/s"
latency_seconds = "45 us\""""
ONE_HOST = """\
What connects hosts was not measured. A plan for more devices than one host has needs another level:
[[links]]
bytes_per_second = "400 Gb/s"
latency_seconds = "45 us\""""
CURVES = """\
Measured inside the innermost level, with so many groups at the same time. Bytes are the whole tensor on one
device: the output of an all-gather, else the input."""


@dataclass(frozen=True)
class Calibration:
    """What was measured of a machine; `print` shows it as a table.

    Arguments:
      hardware: the figures; without links where there is one device only.
      device: its name, as JAX has it.
      devices: how many there were.
      products: per type, the sides of square products and the FLOP/s of each.
    """

    hardware: Hardware
    device: str
    devices: int
    products: Mapping[str, tuple[tuple[int, float], ...]]

    def __str__(self) -> str:
        h = self.hardware
        items = {size: name for name, size in ITEMS.items()}
        of = [
            *((f"{items[n]} products", f"{rate / 1e9:,.4g} GFLOP/s") for n, rate in h.flops_per_second),
            ("element-wise", f"{h.vector_flops_per_second / 1e9:,.4g} GFLOP/s"),
            ("memory", f"{bytes_text(h.memory_bytes_per_second)}/s, {bytes_text(h.memory_bytes)}"),
            ("a small op", seconds_text(h.launch_seconds)),
            *(
                ("links", f"{bytes_text(x.bytes_per_second)}/s, {seconds_text(x.latency_seconds)} latency")
                for x in h.links
            ),
        ]
        wide = max(len(name) for name, _ in of)
        lines = [
            f"{h.name}: {self.devices} x {self.device}, each:",
            "",
            *(f"  {name:<{wide}}  {text}" for name, text in of),
        ]
        return "\n".join([*lines, *self._curves()])

    def _curves(self) -> Iterator[str]:
        """A row per collective and group size, a column per size."""
        curves = self.hardware.curves
        if not curves:
            return
        sizes = sorted({2 ** (size - 1).bit_length() for _, c in curves for size in c.sizes})
        yield "\n  " + " " * 29 + "".join(f"{bytes_text(size):>10}" for size in sizes)
        for kind, c in curves:
            at = {2 ** (size - 1).bit_length(): t for size, t in zip(c.sizes, c.seconds, strict=True)}
            cells = (seconds_text(at[size]) if size in at else "" for size in sizes)
            name = f"{kind.replace('_', '-')} over {c.ranks} devices"
            yield f"  {name:<29}" + "".join(f"{cell:>10}" for cell in cells).rstrip()

    def toml(self) -> str:
        """The file that `sbp.hardware.hardware_from` reads."""
        today = datetime.date.today().isoformat()
        here = f"{self.devices} x {self.device}"
        remarks = {
            "": f"{here}, measured {today} with jax {jax.__version__} by python -m sbp calibrate.",
            "launch_seconds": "Of a small op in a program.",
            "efficiency": "The rates below are those that were reached.",
            "links": "The latency and the rate that explain the collectives below best.",
            "collectives": CURVES if self.hardware.curves else "",
        }
        if self.hardware.links and self.hardware.links[-1].devices != ANY:
            remarks["end"] = ONE_HOST
        elif not self.hardware.links:
            remarks["end"] = NO_LINKS
        return hardware_text(self.hardware, remarks)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file."""
        Path(path).write_text(self.toml(), encoding="utf-8")


Work = Callable[[Any], Any]
"""What is timed: from arrays of one device to arrays of the same shapes."""

AXIS = "group"


@dataclass(frozen=True, slots=True)
class MeasuringEffort:
    """How much is measured.

    Arguments:
      seconds: how long each measurement goes on at the most, once it is compiled.
      runs: of each program at the most.
      repeats: of what is timed, inside a program.
      sides: of square matrix products, up to the first one that takes `slow_seconds`.
      slow_seconds: of one product or one collective; nothing larger is tried then.
      stream_bytes: of the array that memory is measured with, per device.
      sizes: of collectives, bytes of the whole tensor on one device.
    """

    seconds: float = 0.25
    runs: int = 10
    repeats: int = 4
    sides: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    slow_seconds: float = 0.03
    stream_bytes: int = 1 << 26
    sizes: tuple[int, ...] = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)


SMALL = MeasuringEffort(0.01, 2, 2, (32, 64), 0.01, 1 << 16, (1 << 10, 1 << 14))
"""For tests: figures of no worth, within seconds."""


def calibrate(
    devices: Sequence[JaxDevice] | None = None,
    name: str = "this machine",
    effort: MeasuringEffort | None = None,
    said: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Measures the devices of this machine.

    Arguments:
      devices: of one kind; default: all that JAX sees.
      name: of the machine.
      effort: how much is measured.
      said: is told what is being measured.

    Raises:
      PlacementError: for no devices.
    """
    given, effort = tuple(jax.devices() if devices is None else devices), effort or MeasuringEffort()
    if not given:
        why, fix = "there is nothing to measure", "jax.devices()"
        raise PlacementError(
            Problem("placement", "calibrate(devices=...)", "no device", "at least one", why, fix)
        )
    bench = _Bench(given, effort)
    said("matrix products")
    products = dict(_products(bench))
    said("memory and vector units")
    memory, vector, launch = _memory(bench), _vector(bench), _launch(bench)
    curves = list(_collectives(bench, said))
    platform = given[0].platform
    best = {ITEMS[of]: max(rate for _, rate in found) for of, found in products.items()}
    hardware = Hardware(
        name=name,
        flops_per_second=tuple(sorted(best.items())),
        vector_flops_per_second=vector,
        memory_bytes_per_second=memory,
        memory_bytes=_capacity(given),
        # Forced CPU devices are as many as one wants, all in one memory; other devices are in one host.
        links=(fitted_link(curves, ANY if platform == "cpu" else len(given)),) if curves else (),
        efficiency=1.0,
        merges_collectives=platform == "gpu",
        platform=platform,
        launch_seconds=launch,
        curves=tuple(curves),
    )
    return Calibration(hardware, str(given[0].device_kind), len(given), products)


@dataclass(frozen=True)
class _Bench:
    """Devices to measure, and how long."""

    devices: tuple[JaxDevice, ...]
    effort: MeasuringEffort

    def mesh(self, ranks: int) -> Mesh:
        """As many groups of `ranks` devices as there are."""
        count = len(self.devices) // ranks * ranks
        grid = np.array(self.devices[:count], dtype=object).reshape(-1, ranks)
        return Mesh(grid, ("groups", AXIS), axis_types=(AxisType.Auto,) * 2)

    def seconds(self, work: Work, args: Any, ranks: int = 1, repeats: int | None = None) -> float:
        """The least time of one piece of work, on all devices at once.

        Arguments:
          args: what one device starts with.
        """
        n, mesh = repeats or self.effort.repeats, self.mesh(ranks)
        spec = partition_spec()

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        def run(args: Any) -> Any:
            return lax.fori_loop(0, n, lambda _, x: work(x), args)

        args = jax.device_put(args, NamedSharding(mesh, spec))
        block_until_ready(run(args))
        times: list[float] = []
        while not times or (len(times) < self.effort.runs and sum(times) < self.effort.seconds):
            start = time.perf_counter()
            block_until_ready(run(args))
            times.append(time.perf_counter() - start)
        return min(times) / n


def _products(bench: _Bench) -> Iterator[tuple[str, tuple[tuple[int, float], ...]]]:
    """Per type, the FLOP/s of square products, from small ones to the first that is slow."""
    types = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float64": jnp.float64}
    for of, dtype in types.items():
        found: list[tuple[int, float]] = []
        with jax.enable_x64(of == "float64"):
            for side in bench.effort.sides:
                taken = bench.seconds(lambda v: v @ v, jnp.full((side, side), 1 / side, dtype))
                found.append((side, 2 * side**3 / taken))
                if taken > bench.effort.slow_seconds:
                    break
        yield of, tuple(found)


def _memory(bench: _Bench) -> float:
    """Bytes per second that are read and written by an op on a large array."""
    count = bench.effort.stream_bytes // 4
    return 8 * count / bench.seconds(lambda v: v * 1.0001 + 0.5, jnp.ones(count, jnp.float32))


def _vector(bench: _Bench) -> float:
    """FLOP/s of arithmetic on values that stay in registers."""
    count, steps = 1 << 16, 128

    def work(v: Any) -> Any:
        for _ in range(steps):
            v = v * 1.0001 + 0.5
        return v

    return 2 * steps * count / bench.seconds(work, jnp.ones(count, jnp.float32))


def _launch(bench: _Bench) -> float:
    """Seconds that a small op takes beside its work: products too small to count, one after the other."""
    steps = 32

    def work(v: Any) -> Any:
        for _ in range(steps):
            v = optimization_barrier(v @ v)
        return v

    return bench.seconds(work, jnp.full((8, 8), 0.125, jnp.float32)) / steps


def _shift(v: Any, ranks: int) -> Any:
    return ppermute(v, AXIS, [(i, (i + 1) % ranks) for i in range(ranks)])


# Each from a tensor to one of its shape, so that it can be repeated; what makes it so is behind a barrier.
COLLECTIVES: dict[str, Callable[[Any, int], Any]] = {
    "all_reduce": lambda v, n: psum(v, AXIS) / n,
    "all_gather": lambda v, n: optimization_barrier(all_gather(v[: len(v) // n], AXIS, tiled=True)) * 1.0001,
    "reduce_scatter": lambda v, n: jnp.tile(optimization_barrier(psum_scatter(v, AXIS, tiled=True)) / n, n),
    "all_to_all": lambda v, n: all_to_all(v, AXIS, 0, 0, tiled=True) * 1.0001,
    "permute": lambda v, n: _shift(v, n) * 1.0001,
}


def _group_work(kind: str, ranks: int) -> Work:
    """A collective over groups of so many devices."""
    return lambda v: COLLECTIVES[kind](v, ranks)


def _collectives(bench: _Bench, said: Callable[[str], None]) -> Iterator[tuple[str, CollectiveCurve]]:
    """Curves of all collectives over groups of 2, 4, ... and all devices."""
    count = len(bench.devices)
    every = sorted({2**i for i in range(1, count.bit_length()) if 2**i <= count} | ({count} - {1}))
    for ranks in every:
        for kind in KINDS:
            said(f"{kind.replace('_', '-')} over {ranks} devices")
            sizes, seconds = list[int](), list[float]()
            work = _group_work(kind, ranks)
            for size in bench.effort.sizes:
                # Each device has a part of the same length.
                elements = max(1, size // 4 // ranks) * ranks
                seconds.append(bench.seconds(work, jnp.ones(elements, jnp.float32), ranks))
                sizes.append(4 * elements)
                if seconds[-1] > bench.effort.slow_seconds:
                    break
            yield (
                kind,
                CollectiveCurve(ranks, count // ranks, tuple(sizes), tuple(rise_monotonically(seconds))),
            )


def fitted_link(curves: Sequence[tuple[str, CollectiveCurve]], devices: int) -> Link:
    """The latency and the rate that explain all curves best: t = latency + wire / rate, relative errors.

    Arguments:
      devices: what the level connects.
    """
    wire, seconds = list[float](), list[float]()
    for kind, c in curves:
        others = (c.ranks - 1) / c.ranks
        share = {"all_reduce": 2 * others, "permute": 1.0}.get(kind, others)
        wire += [share * size for size in c.sizes]
        seconds += c.seconds
    rows = np.stack([np.ones(len(wire)), np.asarray(wire)], axis=1) / np.asarray(seconds)[:, None]
    (latency, per_byte), _ = nnls(rows, np.ones(len(wire)))
    slowest = max(w / t for w, t in zip(wire, seconds, strict=True))
    return Link(devices, 1 / per_byte if per_byte else slowest, float(latency) or min(seconds))


def _capacity(devices: Sequence[JaxDevice]) -> float:
    """What one device has for arrays: what JAX may take of it, or its part of the memory of the host."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / len(devices)
    except (AttributeError, OSError, ValueError):
        return math.inf
