"""Keys that are sent a step ahead: the same numbers, whatever is announced, and nothing is sent twice."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import S
from sbp.options import ExchangeOptions
from sbp.passes.physical.exchanges import ReadAhead, find_read_ahead
from sbp.passes.physical.program import Physical
from sbp.runtime.embedding.optimizers import rowwise_adagrad
from sbp.runtime.hlo.meter import read_compiled
from tests.passes.rows.test_tables import DEAR

WIDTHS, ROWS, BATCH = (4, 8), 1024, 256
TX = sbp.rows(rowwise_adagrad(0.1))
Step = Callable[..., Any]


def train(params: Any, state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        found = [
            t.at[i % ROWS].get(mode="fill", fill_value=0) for t, i in zip(params, batch["ids"], strict=True)
        ]
        return jnp.square(jnp.tanh(jnp.concatenate(found, -1)).sum(-1) - batch["wanted"]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    added, state = TX.update(grads, state, params)
    return optax.apply_updates(params, added), state, value


@cache
def program(prefetch: bool) -> Any:
    return sbp.compile(
        train,
        sbp.placement("cpu", shape=(8,)),
        in_sbp=([S(0)], sbp.AUTO, [S(0)]),
        options=sbp.Options(hardware=DEAR, exchange=ExchangeOptions(prefetch=prefetch)),
        donate_argnums=(0, 1),
    )


def begin() -> Any:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(ROWS, w)).astype(np.float32) for w in WIDTHS]
    return jax.tree.map(np.asarray, (params, TX.init(params)))


def batches(count: int = 4, last: int = BATCH) -> list[Any]:
    """Batches of many kinds of keys; the last may be another size."""
    rng, out = np.random.default_rng(1), []
    for i in range(count):
        n = last if i == count - 1 else BATCH
        draws = rng.integers(0, 2 * ROWS, n), np.minimum(rng.zipf(1.1, n), ROWS), np.full(n, 7)
        ids = [draws[(i + k) % 3].astype(np.int32) for k in range(len(WIDTHS))]
        out.append({"ids": ids, "wanted": rng.normal(size=n).astype(np.float32)})
    return out


def trained(prefetch: bool, data: Sequence[Any], announced: Sequence[Any] = ()) -> list[Any]:
    """The leaves of all that is left after a step for each batch."""
    state, losses = begin(), []
    for i, batch in enumerate(data):
        if i < len(announced) and announced[i] is not None:
            program(prefetch).read_ahead(None, None, announced[i])
        *state, loss = program(prefetch)(*state, batch)
        losses.append(float(loss))
    return [*map(np.asarray, jax.tree.leaves(state)), losses]


def same(one: Sequence[Any], other: Sequence[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_numbers_are_the_same_and_keys_are_sent_once() -> None:
    """Announced in full, in part and not at all, and with a batch of another size at the end."""
    data = batches(last=BATCH // 2)
    usual = trained(False, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(usual, trained(True, data, data[1:]))
        same(usual, trained(True, data, [data[1], None, data[3]]))
        same(usual, trained(True, data))
    compiled = program(True).lower(*begin(), data[0]).compile()
    meter, plan = read_compiled(compiled), program(True).plan(*begin(), data[0])
    assert [c.kind for c in meter.collectives].count("all_to_all") == 3
    assert meter.wire_bytes == pytest.approx(plan.wire_bytes, rel=1e-9)


def test_another_batch_than_announced() -> None:
    """Equal numbers do not count: the keys were read from other arrays, which may have changed since."""
    data = batches()
    other = jax.tree.map(np.array, data[1])
    with pytest.warns(UserWarning, match="announced another batch than the one that came"):
        found = trained(True, data, [other, data[2], data[3]])
    same(trained(False, data), found)


def test_a_saved_program_does_not_read_ahead(tmp_path: Path) -> None:
    data, path = batches(2), tmp_path / "step.sbpx"
    usual = trained(True, data, data[1:])
    program(True).save_executable(path, *begin(), data[0])
    loaded, state = sbp.load_executable(path), begin()
    for batch in data:
        *state, _ = loaded(*state, batch)
    same(usual[:-1], [*map(np.asarray, jax.tree.leaves(state))])


def test_fit_announces() -> None:
    """The same numbers, and no batch is drawn that is not wanted."""
    drawn = {False: 0, True: 0}

    def run(prefetch: bool) -> Any:
        def batch(i: int) -> Any:
            drawn[prefetch] += 1
            return data[i]

        return sbp.fit(program(prefetch), tuple(begin()), batch, steps=len(data), progress=False)

    data = batches()
    usual, ahead = run(False), run(True)
    assert drawn[False] == drawn[True]
    same(jax.tree.leaves(usual.state), jax.tree.leaves(ahead.state))
    assert [m["loss"] for m in usual.history] == [m["loss"] for m in ahead.history]


def found(fn: Step, *args: Any, donated: Sequence[int] = ()) -> ReadAhead | None:
    """What can be read ahead of a program whose arguments are split."""
    given = sbp.compile(
        fn, sbp.placement("cpu", shape=(8,)), in_sbp=[S(0)], options=sbp.Options(hardware=DEAR)
    )
    physical = given.plan(*args).physical
    assert isinstance(physical, Physical)
    return find_read_ahead(physical, len(jax.tree.leaves(args)), donated)


def test_what_cannot_be_read_ahead() -> None:
    table, ids = jax.ShapeDtypeStruct((ROWS, 8), np.float32), jax.ShapeDtypeStruct((BATCH,), np.int32)

    def pinned(table: Any, ids: Any) -> Any:
        return sbp.annotate(table.at[ids].get(mode="fill", fill_value=0), [S(0)])

    def chained(a: Any, b: Any, ids: Any) -> Any:
        return pinned(b, pinned(a, ids).sum(-1).astype(np.int32))

    def looped(table: Any, ids: Any) -> Any:
        return jax.lax.scan(lambda c, i: (c + pinned(table, i).sum(), None), 0.0, ids)[0]

    plain = found(pinned, table, ids)
    assert plain is not None and plain.inputs == (1,)
    assert found(pinned, table, ids, donated=[1]) is None
    first = found(chained, table, table, ids)
    assert first is not None and len(first.senders) == 1
    assert found(looped, table, jax.ShapeDtypeStruct((8, 4, 64), np.int32)) is None


def test_the_plan_says_where_nothing_is_read_ahead() -> None:
    options = sbp.Options(exchange=ExchangeOptions(prefetch=True))
    given = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(8,)), options=options)
    given.read_ahead(np.ones(8))
    np.testing.assert_array_equal(given(np.ones(8)), np.full(8, 2.0))
    assert any("no keys are sent ahead" in note for note in given.plan(np.ones(8)).notes)
