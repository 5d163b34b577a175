"""What is saved in histories: each leaf, and each element, tells which save it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

ROWS, COLUMNS, PITCH = 8, 4, 64
PLACES = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


def arrays_of(tag: int) -> dict[str, Any]:
    """The state of a save, on the host; every element is another one in the state of another save."""
    small = np.array([tag, -tag, 7 * tag], np.int32)
    return {"params": {"w": PLACES + np.float32(PITCH * tag), "b": small}, "count": tag}


def state_of(tag: int) -> dict[str, Any]:
    """The state of a save, its largest array over two devices."""
    state = arrays_of(tag)
    state["params"]["w"] = jax.device_put(state["params"]["w"], split("x"))
    return state


def extra_of(tag: int) -> dict[str, Any]:
    """What is kept beside it; every third has an array, which stands in a file of its own."""
    return {"tag": tag, "rows": np.arange(tag % 7)} if tag % 3 == 0 else {"tag": tag}


def split(*axes: str | None) -> NamedSharding:
    """A sharding over the two devices of a worker."""
    return NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec(*axes))


def _like(sharding: Any) -> dict[str, Any]:
    like = arrays_of(0)
    like["params"]["w"] = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=sharding)
    return like


LAYOUTS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "rows": lambda: (_like(split("x")), {}),
    "columns": lambda: (_like(split(None, "x")), {}),
    "copies": lambda: (_like(split()), {}),
    "host": lambda: (arrays_of(0), {}),
    "weights": lambda: (_like(split("x"))["params"], {"only": "params"}),
    "half": lambda: (_like(split(None, "x"))["params"], {"only": "params", "dtype": jnp.bfloat16}),
}
"""How a step is restored: what for `like=`, and further arguments."""


def tag_in(found: Any, layout: str) -> int | str:
    """The save that a restored state belongs to, bit by bit; or what was found, where it is a mixture."""
    params = found if layout in ("weights", "half") else found["params"]
    tag = int(np.asarray(params["b"])[0])
    expected = arrays_of(tag)
    if layout == "half":
        expected["params"]["w"] = expected["params"]["w"].astype(jnp.bfloat16)
    wanted = expected["params"] if params is found else expected
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    same = all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
    return tag if same else f"a mixture: {jax.tree.map(lambda x: np.asarray(x).tolist(), found)}"
