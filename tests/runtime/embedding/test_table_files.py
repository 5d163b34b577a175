"""Tables go to files of others and come back: every array, in any layout, a piece at a time."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp.errors import EmbeddingError
from sbp.runtime.embedding import table_files
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.table_files import export_table, import_table
from tests.errors.messages import Messages, check_message
from tests.runtime.embedding.test_table_state import LINE, three
from tests.runtime.embedding.test_tables import one

parquet = pytest.importorskip("pyarrow.parquet")


def begun(c: Collection, seed: int) -> Any:
    """Parameters and Adam's state, all of them random."""
    params = c.init(jax.random.key(seed), LINE)
    state = sbp.rows(optax.adam(0.1)).init({n: x.reshape(-1, x.shape[-1]) for n, x in params.items()})
    random = np.random.default_rng(seed)
    return params, jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), state)


@pytest.mark.parametrize(("then", "now"), [("rows", "columns"), ("whole", "rows")])
def test_parquet_holds_every_array(
    then: str, now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "PIECE_ROWS", 16)
    old, new, path = three(then), three(now), tmp_path / "a.parquet"
    state = begun(old, 1)
    export_table(old, state, "a", path)
    export_table(old, state, "a", path)  # a file that is there is replaced
    found = parquet.read_table(path)
    assert found.schema.names == ["id", "[0]", "[1][0].mu", "[1][0].nu"] and found.num_rows == 40
    after = import_table(new, begun(new, 2), "a", path)
    for c, tree in ((old, state), (new, after)):
        (stack,) = c.stacks
        rows = c.read(tree, "a", np.arange(40))
        np.testing.assert_array_equal(np.stack(found["[0]"].to_pylist()), rows[0][stack])
        np.testing.assert_array_equal(np.stack(found["[1][0].nu"].to_pylist()), rows[1][stack][0].nu)
    np.testing.assert_array_equal(*(c.unstack(begun(c, 2)[0])["b"] for c in (old, new)))
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


def test_some_ids_and_some_arrays(tmp_path: Path) -> None:
    """As somebody else might write them; what is not there stays."""
    import pyarrow as pa

    c = three("rows")
    (stack,) = c.stacks
    pretrained = np.arange(16, dtype=np.float64).reshape(2, 8)
    table = pa.table({"id": np.array([7, 3]), "[0]": pa.array(pretrained.tolist())})
    parquet.write_table(table, tmp_path / "some.parquet")
    before = jax.device_get(c.read(begun(c, 3), "a", np.arange(40)))
    params, state = c.read(import_table(c, begun(c, 3), "a", tmp_path / "some.parquet"), "a", np.arange(40))
    np.testing.assert_array_equal(params[stack][np.array([7, 3])], pretrained)
    kept = np.delete(np.arange(40), [3, 7])
    np.testing.assert_array_equal(params[stack][kept], before[0][stack][kept])
    jax.tree.map(np.testing.assert_array_equal, state, before[1])


def test_numpy_has_one_array_in_a_short_type_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "PIECE_ROWS", 16)
    c = three("rows", dtype=jnp.bfloat16)
    params = c.init(jax.random.key(0), LINE)
    export_table(c, {"p": params}, "a", tmp_path / "a.npy")
    whole = np.load(tmp_path / "a.npy")
    assert whole.dtype == np.float32 and whole.shape == (40, 8)
    after = import_table(c, {"p": c.init(jax.random.key(1), LINE)}, "a", tmp_path / "a.npy")["p"]
    np.testing.assert_array_equal(c.unstack(after)["a"], c.unstack(params)["a"])


def exported(suffix: str, tree: Any = None) -> None:
    c = one()
    export_table(c, c.init(jax.random.key(0)) if tree is None else tree(c), "t", f"t{suffix}")


def imported() -> None:
    c = one()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            table_files, "_read_parquet", lambda _: [{"id": np.zeros(1, np.int32), "mu": np.zeros(1)}]
        )
        import_table(c, c.init(jax.random.key(0)), "t", "t.parquet")


def without_pyarrow() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        exported(".parquet")


MESSAGES: Messages = {
    "another kind of file": (
        lambda: exported(".csv"),
        EmbeddingError,
        "t.csv",
        "a file *.csv",
        "*.parquet or *.npy",
        "the end of the name says what the file is",
        "Parquet, which holds every array and its ids",
    ),
    "several arrays for NumPy": (
        lambda: exported(".npy", lambda c: {"p": c.init(jax.random.key(0)), "q": c.init(jax.random.key(0))}),
        EmbeddingError,
        "*.npy",
        "2 arrays: ['p'], ['q']",
        "one array",
        "a file of NumPy is one array",
        "*.parquet, or the tree of the parameters alone",
    ),
    "a column of nothing": (
        imported,
        EmbeddingError,
        "t.parquet",
        "'mu'",
        "'row'",
        "a column is written to the array of its name",
        "columns that export_table has named",
    ),
    "no pyarrow": (
        without_pyarrow,
        EmbeddingError,
        "*.parquet",
        "no pyarrow",
        "pyarrow",
        "Parquet is read and written by it",
        "pip install 'sbp-jax[recommender]', or *.npy",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])
