"""Keys given and keys served: what exchanges count, over all calls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp
from sbp import B, S
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.options import ExchangeOptions

LINE = sbp.placement("cpu", shape=(8,))
ROWS, WIDTH = 4096, 16
TX = sbp.rows(optax.sgd(0.1))


def step(table: Any, state: Any, ids: Any) -> Any:
    """One step; the scale is weakly typed, as results of Python numbers are."""

    def loss(table: Any) -> Any:
        return jnp.square(table.at[ids].get(mode="fill", fill_value=0)).sum()

    value, grad = jax.value_and_grad(loss)(table)
    added, state = TX.update(grad, state, table)
    return optax.apply_updates(table, added), state, value, 2.0


def test_every_key_is_counted() -> None:
    options = sbp.Options(hardware=BYTES_ONLY, exchange=ExchangeOptions(count_keys=True, capacity=2))
    program = sbp.compile(step, LINE, in_sbp=([S(0)], None, [S(0)]), options=options, donate_argnums=0)
    table = np.ones((ROWS, WIDTH), np.float32)
    state: Any = TX.init(table)
    spread = 64 * np.arange(64, dtype=np.int32)
    one_owner = np.arange(64, dtype=np.int32) % 8
    missing = np.where(np.arange(64) % 2, spread, ROWS)
    for ids in (spread, one_owner, missing):
        table, state, _, two = program(table, state, ids)
    assert jnp.asarray(two).weak_type
    looked_up, updated = program.key_counts()
    assert looked_up.op == "sbp_lookup" and looked_up.calls == 3
    assert looked_up.given_keys == looked_up.served_keys == 64 + 64 + 32
    # Of each device its own distinct keys: all 8 are distinct in every batch.
    assert updated.given_keys == updated.served_keys == 64 + 64 + 32
    # Eight keys of one owner with room for two; an update begins again once it is known that they do not fit.
    assert (looked_up.most_rounds, updated.most_rounds) == (4, 5)
    assert str(looked_up).endswith(": 160 keys in 3 calls, all served, in 4 rounds at most")
    assert "test_key_counts.py" in looked_up.source


def test_nothing_is_counted_unless_asked() -> None:
    program = sbp.compile(step, LINE, in_sbp=([S(0)], None, [B]))
    table = np.ones((ROWS, WIDTH), np.float32)
    program(table, TX.init(table), np.zeros(8, np.int32))
    assert program.key_counts() == ()
