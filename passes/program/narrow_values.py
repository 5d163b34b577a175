"""Values that a narrower dtype can hold: they were widened, and at most rearranged since.

Such a value is sent in the narrower dtype. XLA:GPU does this by itself (collective_quantizer.cc), and the
plan must show and price the bytes that are sent.
"""

from collections.abc import Mapping

import jax.numpy as jnp

from sbp.compat import core
from sbp.compat.untyped import DType, finfo, iinfo
from sbp.passes.program.graph import Graph

REARRANGING = frozenset(
    "reshape squeeze expand_dims transpose rev slice dynamic_slice split copy sbp_annotate".split()
)
"""Ops whose results have elements of their first operand, each as it is."""


def narrowest_dtypes(graph: Graph) -> Mapping[int, DType]:
    """Per value that was widened, the narrowest dtype that holds all of it.

    >>> from sbp.passes.program.trace import trace
    >>> import numpy as np
    >>> graph = trace(lambda x: x.astype(np.float32).T, [np.ones((2, 3), np.float16)], {}).graph
    >>> {graph.values[v].name: str(dtype) for v, dtype in narrowest_dtypes(graph).items()}
    {'convert_element_type': 'float16', 'transpose': 'float16'}
    """
    found: dict[int, DType] = {}
    for node in graph.walk():
        x = node.inputs[0] if node.inputs else None
        if not isinstance(x, int) or node.barrier >= 0:
            continue
        narrow = found.get(x)
        if node.op == "convert_element_type":
            wide = graph.values[node.outputs[0]].dtype
            held = narrow if narrow is not None else graph.values[x].dtype
            narrow = held if holds(held, wide) else None
        elif node.op not in REARRANGING:
            narrow = None
        if narrow is not None:
            found.update(dict.fromkeys(node.outputs, narrow))
    return found


def holds(narrow: DType, wide: DType) -> bool:
    """Whether a dtype has fewer bytes than another, which holds each of its numbers.

    >>> import numpy as np
    >>> [holds(np.dtype(a), np.dtype(b)) for a, b in [("f2", "f4"), ("i2", "f4"), ("i4", "f4"), ("f4", "i8")]]
    [True, True, False, False]
    """
    if core.is_key(narrow) or core.is_key(wide) or not 1 <= core.itemsize(narrow) < core.itemsize(wide):
        return False
    if narrow == bool:
        return True
    if jnp.issubdtype(narrow, jnp.integer):
        a = iinfo(narrow)
        if jnp.issubdtype(wide, jnp.integer):
            b = iinfo(wide)
            return bool(b.min <= a.min and a.max <= b.max)
        return jnp.issubdtype(wide, jnp.floating) and a.max <= 2 ** (finfo(wide).nmant + 1)
    if not (jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating)):
        return False
    f, w = finfo(narrow), finfo(wide)
    return bool(f.nmant <= w.nmant and f.maxexp <= w.maxexp and f.minexp - f.nmant >= w.minexp - w.nmant)
