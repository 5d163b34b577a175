"""What `calibrate` found out, as a table to read and as the TOML file that plans are made with."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from sbp.hardware.catalogue import ANY, Hardware
from sbp.hardware.file import ITEMS, hardware_text
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
        lines = [f"{h.name}: {self.devices} x {self.device}, each:", ""]
        lines += [f"  {name:<{wide}}  {text}" for name, text in of]
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
