"""Internals of orbax: the place where TensorStore writes arrays; orbax 0.12 has no `s3://` there.

All of orbax asks one function for it, `build_kvstore_tspec`. It gets the same path behind `gs://`, whose
layout suits any object store, and its result gets TensorStore's own S3 driver.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

tensorstore_utils: Any = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
Spec = Any
"""Of a key-value store, as TensorStore takes it: a tree of dicts and lists."""
CACHE_BYTES = 1 << 28
"""Of decoded chunks of an array that is read in parts: a part of a chunk takes the whole chunk to decode."""
_PROBE = "bucket/folder"


def write_arrays_to_s3(store: Callable[[], Mapping[str, str]]) -> bool:
    """Makes orbax write the arrays of `s3://` paths with TensorStore's driver; gives whether it does.

    An orbax that has `s3://` itself is left as it is.

    Arguments:
      store: gives the `endpoint` and the `aws_region` for that driver, if they are not Amazon's own.
    """
    if _drivers("s3") & {"s3"}:
        return True
    if not _drivers("gs") & {"gcs", "gcs_grpc"}:
        return False
    told = tensorstore_utils.build_kvstore_tspec

    @functools.wraps(told)
    def build_kvstore_tspec(directory: str, *args: Any, **kwargs: Any) -> Spec:
        if not directory.startswith("s3://"):
            return told(directory, *args, **kwargs)
        return _with_s3(told(f"gs{directory[2:]}", *args, **kwargs), store())

    tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec
    return bool(_drivers("s3") & {"s3"})


def _drivers(scheme: str) -> set[str]:
    """The drivers that orbax names for a URL; none if it refuses it."""
    try:
        return {*_named(tensorstore_utils.build_kvstore_tspec(f"{scheme}://{_PROBE}", use_ocdbt=True))}
    except (AttributeError, TypeError, ValueError):
        return set()


def _named(spec: Spec) -> list[str]:
    if isinstance(spec, dict):
        return [spec.get("driver", ""), *(name for x in spec.values() for name in _named(x))]
    return [name for x in spec for name in _named(x)] if isinstance(spec, list) else []


def _with_s3(spec: Spec, store: Mapping[str, str]) -> Spec:
    """A spec with buckets of S3."""
    if isinstance(spec, list):
        return [_with_s3(x, store) for x in spec]
    if not isinstance(spec, dict):
        return spec
    if "bucket" in spec:
        return {"driver": "s3", "bucket": spec["bucket"], "path": spec["path"], **store}
    return {key: _with_s3(x, store) for key, x in spec.items()}


def open_stored(folder: str, name: str) -> Any:
    """A handle of TensorStore to an array that orbax has written: `handle[begin:end].read()` reads a part.

    Arguments:
      folder: that orbax wrote a tree to.
      name: the keys of the array in the tree, with dots between them.
    """
    tensorstore: Any = importlib.import_module("tensorstore")
    spec = {
        "driver": "zarr",
        "kvstore": tensorstore_utils.build_kvstore_tspec(folder, name, use_ocdbt=True),
        "recheck_cached_data": "open",
        "context": {"cache_pool": {"total_bytes_limit": CACHE_BYTES}},
    }
    context = tensorstore_utils.get_ts_context(use_ocdbt=True)
    return tensorstore.open(spec, context=context, read=True, open=True).result()
