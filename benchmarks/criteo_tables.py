"""Which layout for which table of Criteo's terabyte: the choice, its reasons, and one layout for all.

    python -m benchmarks.criteo_tables [--multi-hot] [--bytes] [--placement h100:8] [--memory 80e9]

It plans, so it needs no devices. The sizes are those of the MLPerf benchmarks on the Criteo 1TB logs: DLRM
(one id per feature) and DLRM-DCNv2 (several).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import optax

import sbp
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.runtime.embedding import Choice, FeatureConfig, TableConfig, choose
from sbp.runtime.embedding.costs import KINDS, ROUNDED, TableStep, collection_of
from sbp.runtime.hlo.meter import read_compiled
from sbp.text.units import bytes_text

ROWS = tuple(
    map(
        int,
        "45833188 36746 17245 7413 20243 3 7114 1441 62 29275261 1572176 345138 10 2209 11267 128 4 974 14 "
        "48937457 11316796 40094537 452104 12606 104 35".split(),
    )
)
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
WIDTH, BATCH = 128, 65_536


def features(hotness: Sequence[int], tables: int = len(ROWS)) -> tuple[FeatureConfig, ...]:
    """A feature for each of the first tables.

    Arguments:
      hotness: ids of each.
    """
    configs = [TableConfig(f"C{i}", rows, WIDTH, combiner="sum") for i, rows in enumerate(ROWS, 1)]
    pairs = list(zip(configs, hotness, strict=True))[:tables]
    return tuple(FeatureConfig(table.name, table, (None, n)) for table, n in pairs)


def main(argv: Sequence[str] | None = None) -> Choice:
    """Prints the choice."""
    parser = argparse.ArgumentParser(prog="benchmarks.criteo_tables")
    parser.add_argument("--multi-hot", action="store_true", help="the bags of DLRM-DCNv2")
    parser.add_argument("--bytes", action="store_true", help="the fewest bytes, whatever the time")
    parser.add_argument("--placement", default="h100:8", help="KIND:AxB")
    parser.add_argument("--hlo", action="store_true", help="compile for CPU devices, and meter the bytes")
    parser.add_argument("--memory", type=float, default=80e9, help="bytes per device")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--tables", type=int, default=len(ROWS), help="the first of them")
    options = parser.parse_args(argv)
    if options.hlo:
        jax.config.update("jax_num_cpu_devices", 8)
    kind, _, sizes = options.placement.partition(":")
    choice = choose(
        features(MULTI_HOT if options.multi_hot else (1,) * len(ROWS), options.tables),
        options.batch,
        sbp.placement(kind, shape=tuple(map(int, sizes.split("x")))),
        optimizer=sbp.rows(optax.adagrad(0.05)),
        hardware=BYTES_ONLY if options.bytes else None,
        memory_limit=options.memory,
    )
    print(choice)
    if options.hlo:
        print("\nbytes of a step, as planned and in HLO compiled for CPU devices")
        for name, planned, sent in in_hlo(choice):
            print(f"{name:<12}{bytes_text(planned):>10}{bytes_text(sent):>10}")
    return choice


def in_hlo(choice: Choice) -> Iterator[tuple[str, float, float]]:
    """Of the choice and of each layout for all tables: its bytes as planned, and in compiled HLO."""
    chips = sbp.placement("cpu", shape=choice.placement.shape, axes=choice.placement.axes)
    step = TableStep(choice.batch, chips, choice.hardware, sbp.rows(optax.adagrad(0.05)))
    layouts = {"as chosen": [f.table.placement for f in choice.features]}
    layouts |= {n: [KINDS[n].make(chips.size)] * len(choice.tables) for n in choice.uniform}
    for name, placements in layouts.items():
        tables = [replace(f.table, placement=p) for f, p in zip(choice.features, placements, strict=True)]
        own = [replace(f, table=table) for f, table in zip(choice.features, tables, strict=True)]
        program, args = step.program(collection_of(own, chips.size, ROUNDED))
        planned = program.plan(*args).wire_bytes
        yield name, planned, read_compiled(program.lower(*args).compile()).wire_bytes


if __name__ == "__main__":
    main()
