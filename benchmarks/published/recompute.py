"""Activation checkpointing: which results of a layer are kept, by what was published or by what fits."""

from __future__ import annotations

import re
from collections.abc import Collection

from benchmarks.published.model import KEPT, Decoder, Stage
from benchmarks.published.rows import PublishedStep
from sbp.hardware.catalogue import Hardware

EVERYTHING = frozenset(KEPT)
NOTHING: frozenset[str] = frozenset()
# What a note on a policy says is kept, in the words of MaxText, Paxml and Megatron.
WORDS = (
    (r"minimal|dot_only|only element-?wise", EVERYTHING),
    (r"attention core", EVERYTHING - {"context"}),
    (r"qkv|q, k,? (?:and )?v", frozenset({"qkv", "context"})),
)
MORE_WORDS = ((r"attention-out|qkv_out|out_proj", "out"), (r"mlp-out", "down"))
# "Selective" without more: with cut weights (PyTorch) every second product and the attention; with Megatron's
# layouts all but the attention core, which a fused kernel computes again anyway.
EVERY_SECOND = frozenset({"qkv", "context", "gate", "down", "experts"})
ROOM = 0.95  # of the memory; the rest is for buffers of communication and what lies between others
# Beside a chip with a fast link to its host (NVLink-C2C, 450 GB/s one way), activations can wait there: its
# half of the 480 GB of a Grace.
HOST_BYTES = {"gb200": 240e9}


def kept_results(row: PublishedStep, hardware: Hardware) -> Collection[str]:
    """Names of the results in a layer that are kept for the backward pass.

    Where nothing was published, the most that fits into memory.
    """
    if row.checkpointing == "full":
        return NOTHING
    if row.checkpointing == "none":
        return EVERYTHING
    if row.checkpointing == "selective":
        return _by_words(row) or (EVERY_SECOND if row.layout.fsdp > 1 else EVERYTHING)
    ladder = (EVERYTHING, EVERY_SECOND, frozenset({"qkv", "context"}), NOTHING)
    room = ROOM * hardware.memory_bytes + HOST_BYTES.get(hardware.name, 0.0)
    fits = (kept for kept in ladder if memory_bytes(row, kept) < room)
    return next(fits, NOTHING)


def _by_words(row: PublishedStep) -> Collection[str]:
    notes = row.notes.lower()
    for words, kept in WORDS:
        if re.search(words, notes):
            return kept | {name for more, name in MORE_WORDS if re.search(more, notes)}
    return NOTHING


def memory_bytes(row: PublishedStep, kept: Collection[str]) -> float:
    """What a device of the first stages needs, roughly: state, activations that wait, and logits."""
    ways, d = row.layout, row.width
    e = Decoder(row).head_width
    hidden = row.hidden * (row.experts.active + row.experts.shared if row.experts else 1)
    widths = {
        "qkv": (row.heads + 2 * row.kv_heads) * e,
        "context": row.heads * e,
        "out": d,
        "up": hidden,
        "gate": hidden if row.gated else 0,
        "down": d,
        "experts": 0,  # counted as hidden above
    }
    tokens = row.micro_batch * row.sequence / (ways.cp * ways.tp)
    per_layer = 2 * tokens * (2 * d + sum(widths[name] for name in kept))
    waiting = min(1 + (ways.pp - 1) / (ways.pp * ways.vp), row.micro_batches)
    logits = 6 * tokens * row.vocabulary
    return state_bytes(row) + per_layer * row.layers * waiting + logits


def state_bytes(row: PublishedStep) -> float:
    """Weights in 16 bits, gradients as they are added up, and AdamW's state, of one device."""
    ways, used = row.layout, 6 if row.wide_sums else 4
    dense, experts = weights_of(row)
    share = ways.tp * ways.pp
    if ways.fsdp > 1:
        return (10 + used) * (dense / (ways.fsdp * ways.cp) + experts / ways.fsdp) / share
    copies, expert_copies = ways.dp * ways.cp, ways.dp * ways.cp / ways.ep
    return dense / share * (used + 12 / copies) + experts / (share * ways.ep) * (used + 12 / expert_copies)


def weights_of(row: PublishedStep) -> tuple[int, int]:
    """How many weights are outside of experts, and in them."""
    dense_layers = row.experts.dense_layers if row.experts else row.layers
    return Decoder(row).count(Stage(dense_layers, row.layers - dense_layers))
