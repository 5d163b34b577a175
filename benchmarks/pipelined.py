"""Llama 3 70B on stages of a pipeline: published layouts by hand, priced as benchmarks.published prices rows.

The layers of a stage are planned by the evaluator that prices benchmarks.layouts, on the same hardware, and
their times go through the simulator of schedules. The program is another one than there: layers one by one,
weights in 16 bits beside the optimizer's copy, sequences split between products. So one layout without stages
stands in both tables, and says how far they are apart. Sums of gradients and new weights are taken to run
beside the last backward and the next forward pass, as long as these last, which is more than AUTO's plans are
granted: theirs wait where XLA's scheduler does not hide them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.published.estimate import Estimate, Estimator
from benchmarks.published.recompute import memory_bytes
from benchmarks.published.rows import Layout, PublishedStep, RowError
from models import llama
from sbp.hardware.catalogue import Hardware

CHUNKS = 5
"""Stages on each rank, as NVIDIA's recipe has it; the papers do not say how many."""
RECOMPUTED = {"full": "all", "unknown": "what must be"}
"""Layers computed twice as in benchmarks.layouts, or only what has no room."""
SUMMED = {False: "16 bits", True: "float32"}
"""How gradients are added up over copies. The recipes below that have stages do it in float32: NeMo's
(`grad_reduce_in_fp32`), Llama 3's (section 3.3), and Megatron-LM whatever it trains in bfloat16. AUTO does
where micro-batches are added up before; with one of them it sends the 16 bits that products make."""
HAND_WAYS = (
    # Fully sharded, for comparison with the same layout in benchmarks.layouts.
    ("MaxText, FSDP", Layout()),
    # Narayanan et al., 2021 (arXiv:2104.04473), table 1, 76 billion weights.
    ("Megatron, tensor 8 x pipeline 4", Layout(tp=8, pp=4, vp=CHUNKS)),
    # NVIDIA/NeMo, nemo/collections/llm/recipes/llama3_70b.py.
    ("NeMo, tensor 4 x context 2 x pipeline 4", Layout(tp=4, cp=2, pp=4, vp=CHUNKS)),
    # Grattafiori et al., 2024 (arXiv:2407.21783), table 4, 405 billion weights.
    ("Llama 3, tensor 8 x pipeline 16", Layout(tp=8, pp=16, vp=CHUNKS)),
)


@dataclass(frozen=True)
class PipelinedRow:
    """A layout with stages, and what it takes; the reason where that cannot be said.

    Arguments:
      memory_bytes: of a device, roughly.
    """

    name: str
    estimate: Estimate | None
    memory_bytes: float
    trouble: str = ""

    def line(self, model_flops_per_device: float, peak_flops: float) -> str:
        """A line of the table."""
        e = self.estimate
        if e is None:
            return f"| {self.name} | | | | {self.memory_bytes / 1e9:.1f} | {self.trouble} |"
        mfu = model_flops_per_device / e.seconds / peak_flops
        told = f"{e.seconds:.2f} | {mfu:.3f} | {e.bubble:.2f} | {self.memory_bytes / 1e9:.1f}"
        return f"| {self.name} | {told} | |"


def layouts(devices: int) -> Iterator[tuple[str, Layout]]:
    """Names and layouts on so many devices: what is left over holds copies, or is cut where there are no
    stages.

    >>> [str(ways) for _, ways in layouts(128)][:2]
    ['fsdp128', 'dp4 tp8 pp4 vp5']
    """
    for name, ways in HAND_WAYS:
        rest = devices // ways.gpus
        yield name, replace(ways, dp=rest) if ways.pp > 1 else replace(ways, fsdp=rest)


def step_of(
    config: llama.Config,
    ways: Layout,
    batch: int,
    checkpointing: str,
    micro_batch: int = 1,
    wide_sums: bool = False,
) -> PublishedStep:
    """A layout as a row of benchmarks.published.

    Arguments:
      micro_batch: sequences at a time of each copy of a stage.
      wide_sums: whether gradients are added up over copies in float32.
    """
    return PublishedStep(
        number=0,
        model="Llama",
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        hidden=config.hidden,
        vocabulary=config.vocabulary,
        experts=None,
        sequence=config.sequence,
        global_batch=batch,
        micro_batch=micro_batch,
        precision="bf16",
        chip="H100",
        gpus=ways.gpus,
        layout=ways,
        checkpointing=checkpointing,
        seconds=math.nan,
        year=math.inf,
        notes="",
        wide_sums=wide_sums,
    )


def rows(
    config: llama.Config, devices: int, batch: int, micro_batches: int, hardware: Hardware
) -> Iterator[PipelinedRow]:
    """What every layout takes on so many devices.

    Arguments:
      micro_batches: of a layout without stages.
    """
    for name, ways in layouts(devices):
        sums = SUMMED if ways.pp > 1 else [False]
        for (checkpointing, words), wide in itertools.product(RECOMPUTED.items(), sums):
            at_once = 1 if ways.pp > 1 else batch // ways.fsdp // micro_batches
            row = step_of(config, ways, batch, checkpointing, at_once, wide)
            text = f"{name}: {ways}, computes {words} again, sums in {SUMMED[wide]}"
            try:
                one = Estimator(row, hardware)
                memory = memory_bytes(row, one.kept)
                fits = memory <= hardware.memory_bytes
                estimate, trouble = (one.estimate(), "") if fits else (None, "does not fit")
                yield PipelinedRow(text, estimate, memory, trouble)
            except RowError as e:
                yield PipelinedRow(text, None, math.nan, str(e))
