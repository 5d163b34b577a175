"""Tables are restored by table and id: on other devices, in other layouts and stacks, with every state."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import placement
from sbp.errors import DamagedCheckpointError, EmbeddingError
from sbp.runtime.arrays import blocks
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.optimizers import ftrl, rowwise_adagrad
from sbp.runtime.embedding.restack import Restacking
from sbp.runtime.embedding.row_access import row_writer, stack_leaves
from sbp.runtime.embedding.tables import (
    ColumnWise,
    FeatureConfig,
    Replicated,
    RowWise,
    TableConfig,
    TableLayout,
    TableWise,
)
from tests.errors.messages import Messages

WIDTH = 8
SIZES = {"a": 90, "b": 7, "c": 33, "d": 1}
LAYOUTS: dict[str, TableLayout] = {
    "rows": RowWise(),
    "columns": ColumnWise(),
    "whole": TableWise(8),
    "replicated": Replicated(),
}
PLACES = {
    "8": placement("cpu", shape=(8,)),
    "3": placement("cpu", shape=(3,)),
    "2x4": placement("cpu", shape=(2, 4), axes=("data", "model")),
    "1": placement("cpu", shape=(1,)),
}
OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "rowwise": rowwise_adagrad(0.1),
    "ftrl": ftrl(0.1),
    "sgd": optax.sgd(1.0),
}
ADAM = OPTIMIZERS["adam"]


def four(layout: str | Sequence[str], multiple: int = 24, more: int = 0, width: int = WIDTH) -> Collection:
    """Four tables in one layout, or each in its own."""
    names = [layout] * len(SIZES) if isinstance(layout, str) else layout
    tables = [
        TableConfig(n, rows + more, width, placement=LAYOUTS[one])
        for (n, rows), one in zip(SIZES.items(), names, strict=True)
    ]
    return Collection([FeatureConfig(t.name, t) for t in tables], multiple=multiple)


def like(c: Collection, where: Any, tx: Any = ADAM) -> Any:
    """The shapes and shardings of parameters, optimizer's state, and a dense weight; None for the host."""
    params = {n: jax.ShapeDtypeStruct(s.shape, np.float32) for n, s in c.stacks.items()}
    flat = {n: jax.ShapeDtypeStruct((c.row_maps[n].size, s.shape[-1]), np.float32) for n, s in params.items()}
    state = jax.eval_shape(sbp.rows(tx).init, flat)
    tree = {"tables": params, "state": state, "w": jax.ShapeDtypeStruct((4, 2), np.float32)}
    if where is None:
        return tree
    shardings = c.shardings(where, like=tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def number(name: str, rows: int) -> np.ndarray:
    """Rows that no other table has."""
    first = 1000.0 * (1 + sorted(SIZES).index(name))
    return (first + np.arange(rows, dtype=np.float32))[:, None] + np.arange(WIDTH, dtype=np.float32) / 16


def filled(c: Collection, asked: Any) -> Any:
    """A state whose every row says whose it is; what is not by row is 7."""
    rows = {n: number(n, r) for m in c.row_maps.values() for n, r in zip(m.names, m.rows, strict=True)}
    whole = jax.device_get(c.stack(rows))
    leaves, tree = jax.tree.flatten(asked)
    out = []
    for leaf, x in zip(stack_leaves(asked, c.row_maps), leaves, strict=True):
        value = np.full(x.shape, 7, x.dtype)
        if leaf is not None:
            flat = whole[leaf.stack].reshape(-1, WIDTH)
            sign = -1 if ".nu" in leaf.path else 1
            value = sign * (flat if x.ndim > 1 else flat[:, 0]).reshape(x.shape)
        out.append(value if x.sharding is None else jax.device_put(value, x.sharding))
    return jax.tree.unflatten(tree, out)


def saved(path: Path, c: Collection, where: str = "8", tx: Any = ADAM) -> None:
    with sbp.Checkpoints(path, tables=c) as runs:
        runs.save(filled(c, like(c, PLACES[where], tx)), 3, extra={"epoch": 1})


def same(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    lies = [[getattr(x, "sharding", None) for x in jax.tree.leaves(tree)] for tree in (found, wanted)]
    assert lies[0] == lies[1]


MIXED = ("rows", "rows", "replicated", "columns")
CASES = [
    ("rows", "8", "rows", "3", 9),
    ("rows", "8", "columns", "2x4", 24),
    ("rows", "8", "replicated", "1", 24),
    ("whole", "8", "rows", "2x4", 16),
    ("columns", "8", "whole", "8", 24),
    (MIXED, "8", "rows", "3", 12),
    ("rows", "2x4", MIXED, "8", 8),
]


@pytest.mark.some(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("then", "before", "now", "after", "multiple"), CASES)
def test_rows_come_back_by_table_and_id(
    then: Any, before: str, now: Any, after: str, multiple: int, optimizer: str, tmp_path: Path
) -> None:
    old, new, tx = four(then), four(now, multiple), OPTIMIZERS[optimizer]
    saved(tmp_path, old, before, tx)
    again = sbp.Checkpoints(tmp_path, tables=new)
    asked = like(new, PLACES[after], tx)
    same(again.restore(asked), filled(new, asked))
    assert again.extra() == {"epoch": 1}
    same(again.restore(asked["tables"], only="tables"), filled(new, asked)["tables"])


def test_to_the_host_in_another_precision_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = four("rows"), four("whole")
    saved(tmp_path, old)
    asked = like(new, None)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 10 * WIDTH * 4)  # 10 of 144 rows
    found = sbp.Checkpoints(tmp_path, tables=new).restore(asked, dtype=jnp.bfloat16)
    wanted = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, filled(new, asked)
    )
    same(found, wanted)
    with sbp.Checkpoints(tmp_path / "groups", tables=new) as runs:
        runs.save(filled(new, like(new, PLACES["8"])), 3)
    same(
        sbp.Checkpoints(tmp_path / "groups", tables=old).restore(like(old, None)),
        filled(old, like(old, None)),
    )


def test_a_table_that_has_grown_has_new_rows_behind(tmp_path: Path) -> None:
    old, new = four("rows"), four("columns", more=5)
    saved(tmp_path, old)
    begun = jax.tree.map(lambda x: x * 2, filled(new, like(new, PLACES["8"])))
    found = sbp.Checkpoints(tmp_path, tables=new).restore(begun)
    for name, rows in new.unstack(found["tables"]).items():
        np.testing.assert_array_equal(rows[:-5], number(name, SIZES[name]), err_msg=name)
        np.testing.assert_array_equal(rows[-5:], 2 * number(name, len(rows))[-5:], err_msg=name)
    assert not any(x.is_deleted() for x in jax.tree.leaves(begun))
    shapes = like(new, PLACES["8"])  # without values there are none
    for rows in new.unstack(sbp.Checkpoints(tmp_path, tables=new).restore(shapes)["tables"]).values():
        assert not rows[-5:].any()


def test_a_state_that_was_saved_without_its_tables(tmp_path: Path) -> None:
    c = four("rows")
    asked = like(c, PLACES["8"])
    with sbp.Checkpoints(tmp_path) as runs:
        runs.save(filled(c, asked), 3)
    same(sbp.Checkpoints(tmp_path, tables=c).restore(asked), filled(c, asked))


def test_a_row_that_is_damaged_is_found(tmp_path: Path) -> None:
    old, new = four("rows"), four("replicated")
    saved(tmp_path, old)
    (table,) = old.stacks
    blocks_of = blocks.StoredLines.blocks

    def flipped(self: Any, *args: Any) -> Any:
        for numbers, lines in blocks_of(self, *args):
            self.checksum += ".nu" in f".{self.name}"
            yield numbers, lines

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks.StoredLines, "blocks", flipped)
        with pytest.raises(DamagedCheckpointError, match=rf"\['state'\]\['{table}'\]\[0\].nu has other elem"):
            sbp.Checkpoints(tmp_path, tables=new).restore(like(new, PLACES["8"]))
        sbp.Checkpoints(tmp_path, tables=new).restore(like(new, PLACES["8"]), check=False)


def test_no_device_holds_more_than_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of four times a device's share, and its state: at rest, saved, and restored otherwise."""
    table = TableConfig("t", 1 << 15, 64)
    four_devices, one_more = placement("cpu", shape=(4,)), placement("cpu", shape=(2, 2), axes=("a", "b"))
    old = Collection([FeatureConfig("f", table)])
    new = Collection([FeatureConfig("f", replace(table, placement=ColumnWise()))])
    with sbp.Checkpoints(tmp_path, tables=old) as runs:
        runs.save(old.init(jax.random.key(0), four_devices), 1)
    before, most = in_use(), dict[Any, int]()
    read = blocks.StoredLines.blocks

    def watched(self: Any, *args: Any) -> Any:
        for found in read(self, *args):
            for device, held in in_use().items():
                most[device] = max(most.get(device, 0), held - before.get(device, 0))
            yield found

    monkeypatch.setattr(blocks.StoredLines, "blocks", watched)
    lies = new.shardings(one_more)
    shapes = {n: jax.ShapeDtypeStruct(s.shape, np.float32, sharding=lies[n]) for n, s in new.stacks.items()}
    found = sbp.Checkpoints(tmp_path, tables=new).restore(shapes)
    (array,) = found.values()
    lines = jax.eval_shape(lambda: jnp.zeros((array.nbytes // 4 // 16 // 256, 64)))
    writes = row_writer(array.shape[:1], array.shape, array.sharding).lower(
        array, np.zeros(lines.shape[0], np.int32), lines
    )
    temporary = writes.compile().memory_analysis().temp_size_in_bytes
    own = array.sharding.device_set  # others may hold what other tests have left
    assert len(own) == 4 and max(most[d] for d in own) + temporary <= 1.2 * array.nbytes / 4


def in_use() -> dict[Any, int]:
    """The bytes of all live arrays, by device."""
    found = dict[Any, int]()
    for x in jax.live_arrays():
        for shard in x.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


def joined(counts: Sequence[int]) -> Any:
    """What was a stack each, with a number each, is one stack now."""
    old, new = four(MIXED), four("rows")
    change = Restacking(like(new, None), new.row_maps, old.row_maps, {})
    olds = jax.tree.map(lambda _: 7, change.saved_state())
    for name, count in zip(old.stacks, counts, strict=True):
        first, *rest = olds["state"][name]
        olds["state"][name] = (first._replace(count=count), *rest)
    return change.join(olds, (), lambda *_: None)


(ONE,), (FIRST, SECOND, THIRD) = four("rows").stacks, four(MIXED).stacks
FEWER = Collection(four("rows").features[:3], multiple=24)
MESSAGES: Messages = {
    "a table with fewer rows": (
        lambda: Restacking({}, four("rows", more=2).row_maps, four("rows", more=3).row_maps, {}).check(
            "step_3"
        ),
        EmbeddingError,
        "step_3: table 'a'",
        "93 rows",
        "92 rows or fewer",
        "the rows that were saved are not thrown away, and what was not saved cannot be restored",
        "the tables that were saved",
    ),
    "a table that is gone": (
        lambda: Restacking({}, FEWER.row_maps, four("rows").row_maps, {}).check("step_3"),
        EmbeddingError,
        "step_3: table 'd'",
        "1 rows",
        "the same table here",
        "the rows that were saved are not thrown away, and what was not saved cannot be restored",
        "the tables that were saved",
    ),
    "numbers of stacks that become one": (
        lambda: joined((7, 7, 8)),
        EmbeddingError,
        f"['state'][{ONE!r}][0].count",
        f"7 of {FIRST!r}, 7 of {SECOND!r}, 8 of {THIRD!r}",
        "equal numbers",
        "these stacks are one stack now, which has this number once",
        "tables of different optimizers apart: TableConfig(optimizer=...)",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    call, error, *texts = MESSAGES[name]
    with pytest.raises(error) as caught:
        call()
    problem = caught.value.problems[0]
    assert [problem.where, problem.got, problem.legal, problem.why, problem.fix] == texts
