"""What is documented of a framework and shows in a step: which kernels it calls, and when it talks.

No figure here was fitted, and there is none per framework: a framework says which of several documented ways
its steps run, and each way has the cost that it has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """How steps of a framework run.

    Arguments:
      units: whether cut weights are gathered layer by layer, each layer's as one message, one layer ahead of
        the layer that computes, and its gradients summed up as one message, beside all kernels (PyTorch's
        `fully_shard`, Megatron FSDP). Else collectives lie where XLA's scheduler puts them.
      scans: whether layers run in a loop, which XLA schedules by itself; else as if they followed each other.
      flash2: whether attention runs as FlashAttention-2 where a chip has faster kernels:
        `torch.nn.functional.scaled_dot_product_attention` puts it first on all chips before Blackwell, and
        flash-attn was it; else as cuDNN's, which Transformer Engine prefers on Hopper.
      copies: whether what was gathered is copied to where each weight lies, and gradients to where they are
        sent from (per-parameter sharding of PyTorch's `fully_shard`).
      wide_sums: whether gradients of cut weights are added up in float32 (`reduce_dtype`).
      current_scales: whether the scale of an 8-bit tensor is of its own largest value, which is looked for
        before it is cast; else of those in steps before (delayed scaling).
    """

    units: bool = False
    scans: bool = False
    flash2: bool = False
    copies: bool = False
    wide_sums: bool = False
    current_scales: bool = False


# Both run layers in a loop. For MaxText, gathers and sums may reach into the trips before and after
# (`xla_gpu_enable_pipelined_all_gather` and others; JAX-Toolbox, rosetta/docs/GPU_performance.md), for Paxml
# nothing says so (rosetta/projects/pax/xla_flags, gpt-5b.env and gpt-175b.env there).
MAXTEXT = Framework()
PAXML = Framework(scans=True)
FSDP2 = Framework(units=True, flash2=True, copies=True, wide_sums=True, current_scales=True)
# One flat vector of a layer's weights, of which weights are views; sums in 16 bits as llm-foundry has them
# (`mixed_precision: PURE`).
FSDP1 = Framework(units=True, flash2=True)
BRIDGE = Framework(units=True, current_scales=True)
MEGATRON = Framework(units=True)
PLANNER = Framework()

# By a word in the cell; the first that is found counts.
_WORDS = (
    (r"paxml|\bpax\b", PAXML),
    (r"maxtext", MAXTEXT),
    (r"fsdp1|composer|foundry", FSDP1),
    (r"torchtitan|fsdp2|automodel", FSDP2),
    (r"megatron-bridge", BRIDGE),
    (r"nemo|megatron", MEGATRON),
)


def framework_of(cell: str) -> Framework:
    """That of a row; of one that names none, what the planner itself compiles to.

    >>> framework_of("torchtitan (PyTorch FSDP2)") == FSDP2
    True
    """
    return next((x for words, x in _WORDS if re.search(words, cell.lower())), PLANNER)
