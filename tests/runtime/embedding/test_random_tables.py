"""Random collections saved, and restored into random others: the same vectors, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import sbp
from sbp.errors import CheckpointError, EmbeddingError
from sbp.runtime.embedding import (
    Collection,
    ColumnWise,
    FeatureConfig,
    Replicated,
    RowWise,
    TableConfig,
    TableWise,
)

Array = np.ndarray[Any, Any]
PLACEMENTS = (RowWise(), RowWise(), ColumnWise(), Replicated(), TableWise(2), TableWise(8))


def drawn(sizes: list[int], widths: list[int], rng: np.random.Generator) -> Collection:
    """The same tables, in some order, stacked somehow."""
    place = PLACEMENTS[rng.integers(len(PLACEMENTS))]
    tables = [
        TableConfig(f"t{i}", n, w, placement=place)
        for i, (n, w) in enumerate(zip(sizes, widths, strict=True))
    ]
    order = rng.permutation(len(tables)) if rng.random() < 0.5 else range(len(tables))
    features = [FeatureConfig(f"f{i}", tables[i]) for i in order]
    return Collection(tuple(features), spread=bool(rng.integers(2)), multiple=int(rng.choice([8, 16, 256])))


def state_of(tables: Collection, params: Any, kind: str) -> Any:
    """What an optimizer keeps: a number per element, or per row."""
    rows = {n: s.shape[:-1] for n, s in tables.stacks.items()}
    if kind == "elements":
        return {n: np.asarray(x) * 3 + 1 for n, x in params.items()}
    return {n: np.asarray(x).reshape(np.prod(rows[n]), -1).sum(1) for n, x in params.items()}


@pytest.mark.parametrize("begin", range(0, 500, 2))
@pytest.mark.some(1)
def test_rows_are_found_again(begin: int, tmp_path: Path) -> None:
    for seed in range(begin, begin + 2):
        check(seed, tmp_path / str(seed))


def check(seed: int, folder: Path) -> None:
    """One of them."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    sizes, widths = rng.integers(3, 40, count).tolist(), rng.choice([4, 8], count).tolist()
    old, new = drawn(sizes, widths, rng), drawn(sizes, widths, rng)
    ids = {f"f{i}": rng.integers(-1, n, (6, 2)).astype(np.int32) for i, n in enumerate(sizes)}
    params, kind = old.init(jax.random.key(seed)), str(rng.choice(["elements", "rows"]))
    state = state_of(old, params, kind)
    sbp.save(folder, {"params": params, "state": state}, step=1)
    asked = jax.eval_shape(new.init, jax.random.key(0))
    like = {"params": asked, "state": jax.eval_shape(lambda p: state_like(new, p, kind), asked)}
    alike = set(old.stacks) == set(new.stacks)
    if alike:
        found = sbp.restore(folder, like=like)
    else:
        with pytest.raises(CheckpointError, match=r"is not in it|, too"):
            sbp.restore(folder, like=like)
        with pytest.raises(EmbeddingError, match=r"of another collection"):
            new(params, ids)
        found = {k: new.stack(old.unstack(x)) for k, x in {"params": params, "state": state}.items()}
    for name, vectors in new(found["params"], ids).items():
        np.testing.assert_array_equal(vectors, old(params, ids)[name])
    there, then = new.unstack(found["state"]), old.unstack(state)
    assert there.keys() == then.keys()
    for name in then:
        np.testing.assert_array_equal(there[name], then[name])


def state_like(tables: Collection, params: Any, kind: str) -> Any:
    """The shapes of `state_of`."""
    if kind == "elements":
        return params
    return {n: params[n].reshape(int(np.prod(s.shape[:-1])), -1)[:, 0] for n, s in tables.stacks.items()}


def test_moments_keep_their_own_type() -> None:
    table = TableConfig("t", 5, 4, dtype=jax.numpy.bfloat16)
    tables = Collection((FeatureConfig("f", table),), multiple=8)
    moments = {n: np.full(s.shape, 0.1, np.float32) for n, s in tables.stacks.items()}
    (again,) = tables.stack(tables.unstack(moments), dtype=np.float32).values()
    assert again.dtype == np.float32
    assert float(again[0, 0]) == np.float32(0.1)
