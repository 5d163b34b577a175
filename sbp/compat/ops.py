"""Internals of JAX that write an op in other ops; the other internals are in `compat/core`."""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
from jax._src import dispatch, source_info_util
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.state.discharge import discharge_state
from jax.interpreters import mlir

from sbp.compat.core import Bindable, ClosedJaxpr, JaxprEqn, Primitive, operands_of
from sbp.compat.untyped import PyTree


def discharge(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function with its refs as values, each op with its own line.

    Raises:
      NotImplementedError: for a ref in an op that JAX cannot discharge.
    """
    return discharge_state(closed)


def retrace(fun: Callable[..., PyTree], eqn: JaxprEqn) -> ClosedJaxpr:
    """The closed jaxpr of a function of an equation's operands; its ops have the equation's line."""
    with source_info_util.user_context(eqn.source_info.traceback):
        return jax.make_jaxpr(fun)(*operands_of(eqn))


def expansion(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The closed jaxpr of an equation, if JAX has one that the parameters do not hold."""
    primitive: Bindable = eqn.primitive
    params = eqn.params
    hi = primitive.name == "call_hi_primitive"  # of jax 0.12
    run = primitive.to_lojax if hi else lowered_function(primitive)
    return None if run is None else retrace(lambda *args: run(*args, **params), eqn)


@cache
def lowered_function(primitive: Primitive) -> Callable[..., PyTree] | None:
    """The function by which JAX lowers a primitive, such as a sparse product or one of equinox.

    None for a primitive with another lowering, and for ours, which passes look for.
    """
    entry: Any = mlir
    rule: Any = getattr(entry._lowerings.get(primitive), "rule", None)
    if getattr(rule, "__qualname__", "") != "lower_fun.<locals>.f_lowered":
        return None
    held = inspect.getclosurevars(rule).nonlocals
    run = held["fun"]
    if getattr(run, "func", run).__module__.startswith("sbp."):
        return None
    return run if held["multiple_results"] else lambda *args, **params: [run(*args, **params)]


def run_attention(
    primitive: Bindable, args: Sequence[jax.Array], params: Mapping[str, Any]
) -> list[jax.Array]:
    """One of cuDNN's attentions on one device: its kernel, without JAX's code to partition it."""
    return list(primitive.impl(*args, **params))


CUDNN_VERSION = 92000
"""The cuDNN that is assumed where there is none: JAX asks which one it traces for, and refuses older ones."""
_assuming = threading.RLock()


def has_cudnn() -> bool:
    """Whether JAX finds a cuDNN here."""
    module: Any = fused_attention_stablehlo
    if module.cuda_versions is None:
        return False
    try:
        return bool(module.cuda_versions.cudnn_get_version())
    except RuntimeError:  # a plugin without CUDA's libraries
        return False


@contextlib.contextmanager
def assumed_cudnn(capability: tuple[int, int]) -> Iterator[None]:
    """A context in which JAX traces and lowers `implementation="cudnn"` for a chip that may be absent.

    That needs no cuDNN: JAX asks for its version and for the first GPU only to refuse what they cannot do.
    And it needs devices only to partition the kernels, which are partitioned here already. One thread at a
    time may use it, since it changes attributes of a module.

    Arguments:
      capability: CUDA compute capability of the chip.
    """

    def of(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    module: Any = fused_attention_stablehlo
    answers: dict[str, Any] = {
        "check_compute_capability": lambda least: capability >= of(least),
        "is_cuda_compute_capability_equal": lambda asked: capability == of(asked),
    }
    needing = dispatch.prim_requires_devices_during_lowering
    with _assuming:
        kernels = needing & {module._dot_product_attention_fwd_p, module._dot_product_attention_bwd_p}
        if not has_cudnn():
            answers["cuda_versions"] = SimpleNamespace(cudnn_get_version=lambda: CUDNN_VERSION)
        before = {name: getattr(module, name) for name in answers}
        try:
            for name, answer in answers.items():
                setattr(module, name, answer)
            needing.difference_update(kernels)
            yield
        finally:
            needing.update(kernels)
            for name, answer in before.items():
                setattr(module, name, answer)


def primitives() -> dict[str, Bindable]:
    """All primitives that JAX can lower on some platform, by name; ours are among them."""
    entry: Any = mlir
    tables = [entry._lowerings, *entry._platform_specific_lowerings.values()]
    found: dict[str, Bindable] = {}
    for primitive in (p for table in tables for p in table):
        found.setdefault(primitive.name, primitive)
    return found
