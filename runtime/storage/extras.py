"""What is kept beside the state: a tree of what JSON can hold, of bytes, arrays and keys.

The tree goes into the manifest; arrays stand in a file of NumPy's beside it, by number.
"""

import base64
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from sbp.compat.core import is_key
from sbp.compat.untyped import PyTree
from sbp.errors import CheckpointError
from sbp.runtime.storage import messages

_ARRAY, _KEY, _BYTES = "__array__", "__key__", "__bytes__"
"""Keys of the dicts that stand for an array, for a PRNG key, and for bytes."""


def encode(extra: PyTree) -> tuple[Any, bytes]:
    """A tree as JSON, and the file of its arrays; empty bytes where it has none.

    Raises:
      CheckpointError: for what is neither JSON nor an array.
    """
    arrays = list[np.ndarray[Any, Any]]()
    content = _encoded(extra, arrays, "extra")
    if not arrays:
        return content, b""
    file = io.BytesIO()
    words = {str(i): np.ascontiguousarray(x).reshape(-1).view(np.uint8) for i, x in enumerate(arrays)}
    np.savez(file, **words)  # type: ignore[arg-type]
    return content, file.getvalue()


def decode(content: Any, file: bytes) -> Any:
    """The tree that was encoded; tuples have become lists.

    Raises:
      ValueError, KeyError: if the file is not what was written.
    """
    arrays = dict[str, np.ndarray[Any, Any]]()
    if file:
        with np.load(io.BytesIO(file), allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
    return _decoded(content, arrays)


def digest(file: bytes) -> str | None:
    """The SHA-256 of the file; None where there is none."""
    return hashlib.sha256(file).hexdigest() if file else None


DAMAGE = (ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError)
"""What `decode` raises for bytes that it has not written."""


# -- inside


def _encoded(x: Any, arrays: list[np.ndarray[Any, Any]], where: str) -> Any:
    if isinstance(x, Mapping):
        if wrong := [key for key in x if not isinstance(key, str) or key in (_ARRAY, _KEY, _BYTES)]:
            raise CheckpointError(messages.extra(where, f"the key {wrong[0]!r}"))
        return {key: _encoded(value, arrays, f"{where}[{key!r}]") for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_encoded(value, arrays, f"{where}[{i}]") for i, value in enumerate(x)]
    if isinstance(x, jax.Array) and is_key(x.dtype):
        words = _encoded(np.asarray(jax.random.key_data(x)), arrays, where)
        return {_KEY: str(jax.random.key_impl(x)), "words": words}
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        arrays.append(np.array(x))
        return {_ARRAY: len(arrays) - 1, "dtype": arrays[-1].dtype.name, "shape": list(arrays[-1].shape)}
    if isinstance(x, bytes):
        return {_BYTES: base64.b64encode(x).decode()}
    try:
        return json.loads(json.dumps(x))
    except (TypeError, ValueError, RecursionError):
        raise CheckpointError(messages.extra(where, f"a {type(x).__name__}")) from None


def _decoded(x: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(x, list):
        return [_decoded(value, arrays) for value in x]
    if not isinstance(x, dict):
        return x
    if _ARRAY in x:
        return arrays[str(x[_ARRAY])].view(jax.numpy.dtype(x["dtype"])).reshape(x["shape"])
    if _BYTES in x:
        return base64.b64decode(x[_BYTES])
    if _KEY in x:
        return jax.random.wrap_key_data(_decoded(x["words"], arrays), impl=x[_KEY])
    return {key: _decoded(value, arrays) for key, value in x.items()}
