"""Applications of the ops that look up rows of a table and add to them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from sbp.rules import add_rows_p, lookup_p
from tests.rules.claims import Sample, sample, whole

MODES = {m.name: m for m in GatherScatterMode}
TABLE = whole((7, 3))
WILD = np.array([[6, 0, 3], [-1, 8, 2], [-9, 7, 1], [5, 5, 0], [100, -100, 4]], np.int32)
MILD = np.clip(WILD, 0, 6)
ROWS = whole((5, 3, 3), seed=2)
LINE = np.array([6, 0, 9, -8, 3, 3, 6], np.int32)
THREE: Any = {"groups": (3,)}


def params(mode: str, fill: Any = None, capacity: int | None = None, wire: str | None = None) -> Any:
    """Those of both ops."""
    return {"mode": MODES[mode], "fill_value": fill, "capacity": capacity, "wire_dtype": wire}


def look_up(table: Any, ids: Any, *how: Any, label: str = "", **options: Any) -> Sample:
    """Rows of a table."""

    def run(table: Any, ids: Any) -> Any:
        return lookup_p.bind(table, ids, **params(*how))[0]

    return sample("sbp_lookup", run, table, ids, label=f"{how[0]}{label}", **options)


def add(table: Any, ids: Any, rows: Any, *how: Any, label: str = "", **options: Any) -> Sample:
    """Rows added to a table."""

    def run(table: Any, ids: Any, rows: Any) -> Any:
        return add_rows_p.bind(table, ids, rows, **params(*how))[0]

    return sample("sbp_add_rows", run, table, ids, rows, label=f"{how[0]}{label}", **options)


SAMPLES = [
    look_up(TABLE, WILD, "FILL_OR_DROP", pairs=4),
    look_up(TABLE, WILD, "FILL_OR_DROP", 7, label="-seven", **THREE),
    look_up(TABLE.astype(np.int32), WILD[:, 0], "FILL_OR_DROP", label="-int", **THREE),
    look_up(whole((7, 3), bool), LINE, "FILL_OR_DROP", label="-bool", **THREE),
    look_up(jnp.asarray(TABLE, jnp.bfloat16), LINE, "FILL_OR_DROP", label="-bfloat16", **THREE),
    look_up(whole((200, 3)), LINE.astype(np.int8), "FILL_OR_DROP", label="-int8", **THREE),
    look_up(whole((300, 3)), abs(LINE).astype(np.uint8), "CLIP", label="-uint8", **THREE),
    look_up(whole((7, 2, 3)), LINE, "CLIP", label="-two-dims", pairs=2),
    look_up(TABLE, LINE.astype(np.uint32) * 400_000_000, "CLIP", label="-uint32", **THREE),
    look_up(TABLE[:, 0], LINE, "PROMISE_IN_BOUNDS", label="-no-dims", **THREE),
    look_up(TABLE, MILD, "PROMISE_IN_BOUNDS", None, None, "bfloat16", label="-wire", pairs=0, **THREE),
    look_up(TABLE[:1], LINE, "FILL_OR_DROP", label="-one-row", pairs=0, **THREE),
    look_up(TABLE, np.int32(4), "FILL_OR_DROP", label="-one", pairs=0, **THREE),
    add(TABLE, WILD, ROWS, "FILL_OR_DROP", pairs=4),
    add(TABLE, WILD, ROWS, "CLIP", label="-two", pairs=2, **THREE),
    add(TABLE, WILD, ROWS, "PROMISE_IN_BOUNDS", pairs=0, **THREE),
    add(TABLE.astype(np.int32), LINE, whole((7, 3), np.int32), "FILL_OR_DROP", label="-int", **THREE),
    add(TABLE[:, 0], LINE.astype(np.int8), whole((7,)), "CLIP", label="-no-dims", pairs=0, **THREE),
    add(whole((7, 2, 3)), LINE, whole((7, 2, 3), seed=1), "FILL_OR_DROP", label="-two-dims", **THREE),
    add(
        *(jnp.asarray(x, jnp.bfloat16) if x.dtype != np.int32 else x for x in (TABLE, LINE, whole((7, 3)))),
        "FILL_OR_DROP",
        label="-bfloat16",
        **THREE,
    ),
    add(TABLE, MILD, ROWS, "FILL_OR_DROP", None, None, "bfloat16", label="-wire", pairs=0, **THREE),
    add(TABLE, np.int32(4), ROWS[0, 0], "FILL_OR_DROP", label="-one", pairs=0, **THREE),
    add(TABLE, LINE[:0], ROWS[0, :0], "FILL_OR_DROP", label="-none", pairs=0, **THREE),
]

# Too little room for one round: what is sent is counted without the others.
TIGHT = [
    look_up(TABLE, WILD, "FILL_OR_DROP", None, 1, label="-tight", pairs=2),
    add(TABLE, LINE, whole((7, 3)), "CLIP", None, 2, label="-tight", pairs=2),
]

WIDE = [
    look_up(TABLE.astype(np.float64), LINE.astype(np.int64) << 33, "FILL_OR_DROP", label="-huge", **THREE),
    look_up(TABLE.astype(np.float64), WILD.astype(np.int64), "CLIP", label="-int64", **THREE),
    add(
        TABLE.astype(np.float64),
        LINE.astype(np.int64),
        whole((7, 3), np.float64),
        "FILL_OR_DROP",
        label="-int64",
        **THREE,
    ),
]
