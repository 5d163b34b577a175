"""Layouts of tables by their plans: against every uniform choice, by hand, and by trying all assignments."""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from benchmarks import criteo_tables
from sbp import S
from sbp.errors import EmbeddingError
from sbp.hardware.catalogue import BYTES_ONLY, Hardware, Link
from sbp.runtime.embedding import (
    Choice,
    Collection,
    ColumnWise,
    FeatureConfig,
    QuotientRemainder,
    Replicated,
    RowWise,
    TableConfig,
    TableWise,
    choose,
)
from sbp.runtime.embedding.costs import LAYOUTS, cheapest

DEVICES, BATCH = 4, 512
LINE = sbp.placement("h100", shape=(DEVICES,))
# Its links are slow and its memory is large: few bytes are fast.
SLOW = Hardware("slow", ((8, 1e15),), 1e15, 1e15, 1e12, (Link(1 << 62, 1e6, 1e-9),))


def feature(name: str, rows: int, dim: int = 8, hotness: int | None = None, **table: Any) -> FeatureConfig:
    shape = (None,) if hotness is None else (None, hotness)
    return FeatureConfig(
        name, TableConfig(name, rows, dim, combiner=table.pop("combiner", "sum"), **table), shape
    )


SMALL = (feature("day", 7), feature("user", 100_000), feature("week", 7), feature("tags", 3000, hotness=3))


@cache
def chosen(hardware: Hardware | None) -> Choice:
    return choose(SMALL, BATCH, LINE, optimizer=sbp.rows(optax.adagrad(0.1)), hardware=hardware)


def planned(collection: Collection) -> sbp.Plan:
    """A training step by hand, of tables that are two-dimensional; vectors and slopes are split by batch."""
    tx = sbp.rows(optax.adagrad(0.1))
    tables = jax.eval_shape(collection.init, jax.random.key(0))
    shapes = {f.name: (BATCH, *(f.input_shape or ())[1:]) for f in collection.features}
    ids = {n: jax.ShapeDtypeStruct(s, np.int32) for n, s in shapes.items()}
    slopes = {n: jax.ShapeDtypeStruct((BATCH, 8), np.float32) for n in shapes}

    def step(tables: Any, state: Any, ids: Any, slopes: Any) -> Any:
        vectors, back = jax.vjp(lambda t: collection(t, ids), tables)
        added, state = tx.update(back(slopes)[0], state, tables)
        return vectors, jax.tree.map(jnp.add, tables, added), state

    lying = collection.in_sbp(LINE)
    signatures = (lying, lying, [S(0)], [S(0)])
    options = sbp.Options(hardware=BYTES_ONLY)
    program = sbp.compile(step, LINE, in_sbp=signatures, out_sbp=([S(0)], lying, lying), options=options)
    return program.plan(tables, jax.eval_shape(tx.init, tables), ids, slopes)


@pytest.mark.full
@pytest.mark.parametrize("hardware", [BYTES_ONLY, None], ids=["bytes", "seconds"])
def test_it_costs_no_more_than_any_one_layout(hardware: Hardware | None) -> None:
    choice = chosen(hardware)
    cost = "wire_bytes" if hardware else "seconds"
    assert set(choice.uniform) == set(LAYOUTS)
    for name, one in choice.uniform.items():
        assert getattr(choice.total, cost) <= getattr(one, cost), name
    assert choice.plan.wire_bytes == choice.total.wire_bytes > 0


@pytest.mark.full
def test_the_costs_are_those_of_a_plain_training_step() -> None:
    choice = chosen(BYTES_ONLY)
    rows = Collection(SMALL, multiple=256)
    assert planned(rows).wire_bytes == pytest.approx(choice.uniform["rows"].wire_bytes)
    stacked = sum(math.prod(s.shape) for s in rows.stacks.values())
    assert choice.uniform["rows"].memory_bytes == 2 * 4 * stacked / DEVICES
    assert choice.uniform["replicated"].memory_bytes == 2 * 4 * 8 * (7 + 100_000 + 7 + 3000)


def test_equal_tables_are_planned_once() -> None:
    day, user, week, _ = chosen(None).tables
    assert day.estimates is week.estimates is not user.estimates
    assert day.estimates["replicated"].memory_bytes == 2 * 4 * 8 * 7
    assert user.estimates["whole"].memory_bytes == 2 * 4 * 8 * 100_000 / DEVICES


def test_the_collection_has_the_chosen_placements() -> None:
    choice = chosen(None)
    made = {
        "rows": RowWise(),
        "columns": ColumnWise(),
        "whole": TableWise(DEVICES),
        "replicated": Replicated(),
    }
    collection = choice.collection()
    assert [f.name for f in collection.features] == [f.name for f in SMALL]
    assert [t.placement for t in collection.tables] == [made[t.layout] for t in choice.tables]
    collection.in_sbp(LINE)  # everything divides


def test_tiny_tables_are_copied_and_huge_ones_split() -> None:
    """The gradient of the tiny one is one all-reduce, which is as many bytes as to gather and scatter it."""
    both = [feature("day", 5, dim=6, combiner=None), feature("user", 50_000, dim=6, combiner=None)]
    choice = choose(both, BATCH, LINE, optimizer=optax.sgd(0.1), hardware=SLOW)
    assert [t.layout for t in choice.tables] == ["replicated", "rows"]
    assert set(choice.tables[0].estimates) == {"rows", "replicated"}, (
        "6 columns, and rows that are not pooled"
    )


def test_what_memory_forbids_is_said() -> None:
    """Without a limit both are copied: their gradients are one all-reduce each."""
    both = [feature("a", 16, dim=6, combiner=None), feature("b", 256, dim=6, combiner=None)]

    def under(limit: float | None) -> Choice:
        return choose(both, 2048, LINE, optimizer=optax.sgd(0.1), hardware=SLOW, memory_limit=limit)

    free, bound = under(None), under(5000)
    assert [t.layout for t in free.tables] == ["replicated", "replicated"]
    assert [t.layout for t in bound.tables] == ["replicated", "rows"]
    assert bound.total.memory_bytes <= 5000 < free.total.memory_bytes
    said = "replicated costs less, but not all tables fit so: 6.14 kB on a device for this one"
    assert bound.tables[1].reason.endswith(said)
    assert str(bound).splitlines()[-1].endswith("does not fit")


def test_nothing_fits() -> None:
    with pytest.raises(EmbeddingError) as error:
        choose(
            [feature("user", 1000, dim=6, combiner=None)],
            BATCH,
            LINE,
            optimizer=optax.sgd(0.1),
            memory_limit=5000,
        )
    (problem,) = error.value.problems
    assert problem.got == "memory_limit=5.00 kB on each of 4 devices"
    assert problem.legal == f"{1024 * 6 * 4 // DEVICES:,} bytes or more"
    assert "QuotientRemainder" in problem.fix


@pytest.mark.parametrize(
    ("shape", "batch", "got"),
    [
        (None, 8, "input_shape=None"),
        ((8, None), 8, "input_shape=(8, None)"),
        ((8,), 16, "batch=16"),
        ((None,), 0, "batch=0"),
    ],
)
def test_how_many_ids_there_are_must_be_known(shape: Any, batch: int, got: str) -> None:
    with pytest.raises(EmbeddingError) as error:
        choose([FeatureConfig("f", TableConfig("t", 9, 4), shape)], batch, LINE, optimizer=optax.sgd(0.1))
    assert error.value.problems[0].got == got


@pytest.mark.full
def test_what_is_possible_depends_on_the_table() -> None:
    kept = FeatureConfig("kept", TableConfig("kept", 9, 4, compression=QuotientRemainder(3)), (None, 2))
    choice = choose([kept], 8, LINE, optimizer=optax.sgd(0.1), hardware=SLOW)
    assert set(choice.tables[0].estimates) == {"rows", "columns", "replicated"} == set(choice.uniform)
    assert choice.total.wire_bytes <= min(one.wire_bytes for one in choice.uniform.values())


def test_what_is_printed() -> None:
    text = str(chosen(BYTES_ONLY)).splitlines()
    assert text[0] == "4 tables, batch 512, on h100(x=4), planned for bytes only"
    assert (
        text[4].split() == "table rows x width layout sent rows columns whole replicated memory why".split()
    )
    for line, one in zip(text[5:9], chosen(BYTES_ONLY).tables, strict=True):
        assert line.startswith(one.table.name) and line.endswith(one.reason)
        assert f"{one.table.vocabulary_size:,} x 8" in line and f"  {one.layout}  " in line
        assert one.reason.startswith(("each device", "every device", "one device"))
    assert [line.split()[0] for line in text[11:]] == ["as", *LAYOUTS]
    assert "bytes of a step" in text[1] and "time of a step" in str(chosen(None)).splitlines()[1]


def _memory(assignment: Sequence[str], memory: Sequence[dict[str, float]], stacks: Sequence[int]) -> float:
    total = sum(m[n] for m, n in zip(memory, assignment, strict=True) if n != "whole")
    for stack in set(stacks):
        own = zip(assignment, memory, stacks, strict=True)
        whole = [m["whole"] for n, m, s in own if n == "whole" and s == stack]
        total += max(sum(whole), DEVICES * max(whole, default=0))
    return total


@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_that_fits_is_found(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = [{n: float(random.integers(1, 50)) for n in LAYOUTS} for _ in range(4)]
    del costs[0]["columns"]
    sizes = random.integers(1, 40, 4)
    share = {"rows": 1, "columns": 1, "whole": 1, "replicated": DEVICES}
    memory = [{n: float(size * share[n]) for n in LAYOUTS} for size in sizes]
    stacks, limit = [0, 0, 2, 0], float(sizes.sum() * random.uniform(0.9, 3))
    most = int(random.integers(0, 5))
    limit = math.inf if seed == 0 else limit
    every = [a for a in itertools.product(*costs) if _memory(a, memory, stacks) <= limit]
    every = [a for a in every if a.count("whole") <= most]

    def price(a: Sequence[str]) -> float:
        return sum(c[n] for c, n in zip(costs, a, strict=True))

    found = cheapest(costs, memory, stacks, DEVICES, limit, most)
    if not every:
        assert found is None
    else:
        assert found is not None and _memory(found, memory, stacks) <= limit * (1 + 1e-6)
        assert found.count("whole") <= most
        assert price(found) == min(map(price, every))


def test_the_tables_of_criteo() -> None:
    assert len(criteo_tables.ROWS) == len(criteo_tables.MULTI_HOT) == 26
    choice = criteo_tables.main("--tables 2 --multi-hot --placement h100:2 --batch 256 --bytes".split())
    assert [f.input_shape for f in choice.features] == [(None, 3), (None, 2)]
    assert choice.total.wire_bytes == min(one.wire_bytes for one in choice.uniform.values())
    assert choice.uniform["replicated"].memory_bytes == 2 * 4 * 128 * sum(criteo_tables.ROWS[:2])
