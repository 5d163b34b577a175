"""A row of the table of published steps: what was trained, how it was laid out, how long a step took."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.frameworks import PLANNER, Framework, framework_of


class RowError(ValueError):
    """A row that cannot be read or expressed; the message says why."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in every layer but the first `dense_layers`.

    Arguments:
      active: experts that a token goes to, those that every token goes to (`shared`) not counted.
      count: how many there are to choose from.
      dense_layers: layers at the beginning that have an MLP of width `dense_hidden` instead.
    """

    active: int
    count: int
    shared: int = 0
    dense_layers: int = 0
    dense_hidden: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Over how many devices, or in how many pieces, each way of parallelism cuts.

    Arguments:
      dp: copies of the model; each may keep a part of the optimizer's state (ZeRO-1).
      fsdp: devices that share weights, gradients and optimizer's state (ZeRO-3).
      tp: devices that share each weight's width; between the products they share the sequence.
      pp, vp: pipeline ranks, and stages on each of them.
      cp: devices that share the sequence everywhere.
      ep: devices that share the experts; they lie inside those of dp or fsdp.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """All devices."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        parts = ((name, getattr(self, name)) for name in self.__slots__)
        return " ".join(f"{name}{size}" for name, size in parts if size > 1) or "single"


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """One measured training step.

    Arguments:
      number: of the row, from 1.
      hidden: width between the linear maps of an MLP; of one expert where there are experts.
      global_batch: sequences per step.
      micro_batch: sequences that one dp x fsdp rank computes at once.
      precision: operands of the products: "bf16", "fp16" or "fp8".
      checkpointing: "none", "selective", "full" or "unknown".
      notes: what else was published; some of it says what "selective" means.
      year: when, in years.
      wide_sums: whether gradients are added up over copies in float32, not in 16 bits. No column says so.
      framework: how its steps run.
    """

    number: int
    model: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    experts: Experts | None
    sequence: int
    global_batch: int
    micro_batch: int
    precision: str
    chip: str
    gpus: int
    layout: Layout
    checkpointing: str
    seconds: float
    year: float
    notes: str
    wide_sums: bool = False
    framework: Framework = PLANNER

    @property
    def micro_batches(self) -> int:
        """Passes of forward and backward per step, on each device."""
        return self.global_batch // (self.layout.dp * self.layout.fsdp * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Of one step, on all devices."""
        return self.global_batch * self.sequence

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor parallel devices share the sequence between products, as most do."""
        return "no sequence parallel" not in self.notes.lower()

    @property
    def in_loop(self) -> bool:
        """Whether layers run in a loop."""
        return self.framework.scans and "scan off" not in self.notes.lower()

    @property
    def latent_attention(self) -> bool:
        """Whether keys and values come from one narrow vector (multi-head latent attention)."""
        return "deepseek" in self.model.lower() or "MLA" in self.notes

    @property
    def gated(self) -> bool:
        """Whether the MLP has a third matrix that gates.

        No column says so. Two matrices came with a hidden width of 4 times the width; those with three are
        made narrower (8/3, or up to 3.5 times), or are experts.
        """
        return self.experts is not None or self.hidden != 4 * self.width


def read(path: str | Path) -> list[PublishedStep | RowError]:
    """All rows of a file; in place of one that cannot be read the error."""
    with open(path, newline="", encoding="utf-8") as file:
        return [_row_or_error(i, cells) for i, cells in enumerate(csv.DictReader(file), 1)]


def _row_or_error(number: int, cells: Mapping[str, str | None]) -> PublishedStep | RowError:
    try:
        return parse(number, {k: (v or "").strip() for k, v in cells.items() if k})
    except (KeyError, ValueError) as e:
        return RowError(f"row {number} ({cells.get('model')}): {e}")


def parse(number: int, cells: Mapping[str, str]) -> PublishedStep:
    """One row.

    Arguments:
      number: of the row, from 1.
      cells: by the name of the column.

    Raises:
      RowError: if sizes contradict each other.
      ValueError, KeyError: for a cell that is no number, or is missing.
    """

    def count(column: str, default: int | None = None) -> int:
        cell = cells.get(column, "").replace(",", "")
        if not cell and default is not None:
            return default
        return int(float(cell))

    ways = {name: count(name, 1) for name in Layout.__slots__}
    row = PublishedStep(
        number=number,
        model=cells["model"],
        layers=count("layers"),
        width=count("d_model"),
        heads=count("heads"),
        kv_heads=count("kv_heads", count("heads")),
        hidden=count("d_ff"),
        vocabulary=count("vocabulary"),
        experts=_experts(cells.get("experts", ""), cells.get("notes", "")),
        sequence=count("seq"),
        global_batch=count("global_batch"),
        micro_batch=count("micro_batch_per_gpu", 1),
        precision=_precision(cells["precision"]),
        chip=cells["chip"],
        gpus=count("gpus"),
        layout=Layout(**ways),
        checkpointing=_checkpointing(cells.get("activation_checkpointing", "")),
        seconds=float(cells["step_seconds"]),
        year=_year(cells.get("date", "")),
        notes=cells.get("notes", ""),
        framework=framework_of(cells.get("framework", "")),
    )
    _check(row)
    return row


def _check(row: PublishedStep) -> None:
    ways = row.layout
    if ways.gpus != row.gpus:
        raise RowError(f"{ways} are {ways.gpus} devices, not {row.gpus}")
    if row.global_batch % (ways.dp * ways.fsdp * row.micro_batch):
        raise RowError(f"{row.global_batch} sequences are not whole micro-batches on every device")
    if ways.ep > 1 and (ways.dp * ways.fsdp) % ways.ep:
        raise RowError(f"{ways.ep} expert ranks do not lie inside {ways.dp} x {ways.fsdp}")
    if row.experts and row.experts.count % ways.ep:
        raise RowError(f"{row.experts.count} experts do not divide over {ways.ep} devices")


def _experts(cell: str, notes: str) -> Experts | None:
    """ "2/8", "8+1 shared/256+1 shared"; layers without experts are in the notes.

    >>> _experts("8+1 shared/256+1 shared", "first 3 layers dense with d_ff 18432")
    Experts(active=8, count=256, shared=1, dense_layers=3, dense_hidden=18432)
    """
    if cell.lower() in ("", "-", "none", "0", "1"):
        return None
    found = re.match(r"(\d+)(?:\s*\+\s*(\d+)\D*?)?\s*/\s*(\d+)", cell)
    if found is None:
        raise RowError(f"experts {cell!r} are not 'active/all'")
    dense = re.search(r"first (\d+) layers? dense(?:\D*d_ff (\d+))?", notes)
    return Experts(
        int(found[1]),
        int(found[3]),
        int(found[2] or 0),
        int(dense[1]) if dense else 0,
        int(dense[2] or 0) if dense else 0,
    )


def _precision(cell: str) -> str:
    """The 8-bit formats compute at one rate, whatever their scaling."""
    low = cell.lower()
    for name in ("fp8", "bf16", "fp16"):
        if name in low:
            return name
    raise RowError(f"precision {cell!r} is neither fp8, bf16 nor fp16")


def _checkpointing(cell: str) -> str:
    low = cell.lower()
    return next((name for name in ("none", "selective", "full") if name in low), "unknown")


def _year(cell: str) -> float:
    """ "2024-07" as a number; a year alone is its middle, none is a late one.

    >>> _year("2022-07"), _year("2023 (month unsure)")
    (2022.5, 2023.5)
    """
    found = re.search(r"(20\d\d)(?:-(\d\d))?", cell)
    if found is None:
        return 2100.0
    return int(found[1]) + ((int(found[2]) - 1) / 12 if found[2] else 0.5)
