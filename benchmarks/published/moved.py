"""What a layer moves through memory beside what its ops do: copies that kernels and frameworks ask for."""

from __future__ import annotations

from benchmarks.published.chips import HOPPER, kind_of
from benchmarks.published.model import Decoder, Stage
from benchmarks.published.rows import PublishedStep


def moved_bytes(row: PublishedStep, one: Stage) -> float:
    """Of one layer and one micro-batch, forward and backward, on one device."""
    found = 0.0
    if row.precision == "fp8" and kind_of(row.chip) in HOPPER:
        found += _transposed_bytes(row, one)
    if row.precision == "fp8" and row.framework.current_scales:
        found += 2 * _operands(row, one)  # read in 16 bits for their largest values, before they are cast
    if row.framework.copies and row.layout.fsdp > 1:
        found += _gathered_bytes(row, one)
    return found


def layer_weights(row: PublishedStep, one: Stage) -> float:
    """Of one layer on a device that has them gathered, without experts."""
    return Decoder(row).count(one)[0] / row.layout.tp


def _transposed_bytes(row: PublishedStep, one: Stage) -> float:
    """Of second copies of all operands, the other dim innermost: read and written in 8 bits.

    Products of 8 bits want the dim that they sum over innermost on Hopper, and a forward and a backward pass
    sum over both dims of each operand (Transformer Engine, "Performance considerations"; XLA transposes for
    them too).
    """
    return 2 * (_operands(row, one) + layer_weights(row, one))


def _operands(row: PublishedStep, one: Stage) -> float:
    """Elements of activations and of their gradients that products with weights read; those of several
    products count once."""
    ways, d = row.layout, row.width
    e, tokens = Decoder(row).head_width, row.micro_batch * row.sequence / ways.cp
    experts = row.experts
    hidden = float(row.hidden)
    if experts is not None:
        active = row.hidden * (experts.active + experts.shared)
        hidden = active if one.sparse else experts.dense_hidden
    read = 2 * d + (row.heads * e + hidden) / ways.tp
    inside = (row.heads + 2 * row.kv_heads) * e + hidden * (2 if row.gated else 1)
    return tokens * (read + 2 * d + inside / ways.tp)


def _gathered_bytes(row: PublishedStep, one: Stage) -> float:
    """Of weights copied out of what was gathered, forward and backward, and of gradients copied into what is
    summed up: each read and written."""
    weights = layer_weights(row, one)
    used = 1 if row.precision == "fp8" else 2
    return weights * (2 * (used + used) + 2 + (4 if row.framework.wide_sums else 2))
