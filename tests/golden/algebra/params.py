"""The parameters of an application that its signatures depend on, as text that does not change with JAX."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sbp.compat import core

# Said by the operands and results, without effect on signatures, or not there in every JAX that is supported.
HIDDEN = frozenset(
    """
    accuracy algorithm bit_width computation consts copy_semantics devices dtype impl implementation
    index_dtype input_dtype is_stable jaxpr name new_dtype new_sizes out_dtype out_sharding pin precision
    preferred_element_type recall_target reduction_input_size_override rounding_method samples shape sharding
    sizes srcs subset_by_index update update_consts use_magma weak_type
    """.split()
)
# top_k: before jax 0.11 it is always the last. scatter-...: the op's name says it.
HIDDEN_IN = {"top_k": {"axis"}} | {
    f"scatter-{how}": {"update_jaxpr"} for how in ("add", "sub", "mul", "min", "max")
}
# What a parameter is when it is not asked for; of several dims, in each of them.
USUAL: Mapping[str, int] = {
    "window_strides": 1,
    "lhs_dilation": 1,
    "rhs_dilation": 1,
    "base_dilation": 1,
    "window_dilation": 1,
    "feature_group_count": 1,
    "batch_group_count": 1,
    "padding": 0,
}


def params_text(op: str, params: Mapping[str, Any]) -> list[str]:
    """`name=value` for each parameter that matters, by name.

    >>> params_text("reduce_sum", {"axes": (0, 2), "out_sharding": None})
    ['axes=(0,2)']
    >>> params_text("cumsum", {"axis": 1, "reverse": False})
    ['axis=1']
    """
    hidden = HIDDEN | HIDDEN_IN.get(op, set())
    return [text for name in sorted(params) if name not in hidden for text in _texts(name, params[name])]


def _texts(name: str, value: Any) -> Iterator[str]:
    if value is None or value is False or (isinstance(value, tuple) and not value):
        return
    if name in USUAL and set(np.ravel(value).tolist()) <= {USUAL[name]}:
        return
    fields = getattr(value, "_asdict", None) or getattr(value, "__dataclass_fields__", None)
    if isinstance(value, tuple) and fields is not None:
        for key, inner in value._asdict().items():  # type: ignore[attr-defined]
            if not (key.endswith("_spec") and inner == tuple(range(len(inner)))):
                yield from _texts(key, inner)
    elif fields is not None:
        for key in fields:
            yield from _texts(key, getattr(value, key))
    elif value is True:
        yield name
    else:
        yield f"{name}={_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, tuple | list):
        inner = ",".join(map(_plain, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, int | float | str | np.generic):
        return str(value)
    if core.holds_function(value):
        return "a function"
    return str(getattr(value, "name", value))
