"""Internals of JAX's core: source lines, jaxprs, primitives; and the differences between JAX versions.

`compat/ops` has the internals that write an op in other ops.
"""

import contextlib
import enum
import functools
import inspect
import os
import sysconfig
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import api_util, array, config, effects, source_info_util
from jax._src.interpreters import partial_eval as partial_eval_internal
from jax.extend.core import primitives
from jax.extend.random import threefry_prng_impl
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from sbp.compat.untyped import DType, PyTree
from sbp.compat.untyped import struct as struct  # for those who say compat.struct

Jaxpr = jex.Jaxpr
JaxprEqn = jex.JaxprEqn
Literal = jex.Literal
Primitive = jex.Primitive
Var = jex.Var
DropVar = jex.DropVar
Zero = ad.Zero
SourceInfo = source_info_util.SourceInfo
ClosedJaxpr: TypeAlias = Any
"""A jaxpr with its constants; one class with `Jaxpr` in jax 0.12."""
Atom: TypeAlias = Any
"""A `Var` or a `Literal`, with its `aval`."""
Aval: TypeAlias = Any
"""Shape and dtype of an atom: JAX annotates them as `AbstractValue`, which has neither."""
DimAxes: TypeAlias = list[tuple[str, ...]]
"""Per dim of a tensor, the mesh axes that split it."""
Bindable: TypeAlias = Any
"""A `Primitive` that is bound: JAX leaves that untyped."""
ARRAY: Any = array.ArrayImpl
"""The type of every array that is neither traced nor of typed keys."""
# Call-like primitives and the parameter that holds their body.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "composite": "call_jaxpr",
    "custom_partitioning": "call",
    "xla_metadata_call": "jaxpr",
    "call": "call_jaxpr",
}
# What JAX calls what is inside of them.
_CALLED = {"remat2": "checkpoint", "checkpoint": "checkpoint"}
CUSTOM = {jax.custom_vjp: "custom_vjp_call", jax.custom_jvp: "custom_jvp_call"}

_LIBRARIES = tuple(
    os.path.realpath(p) + os.sep for p in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
)
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_OWN = tuple(
    os.path.join(os.path.dirname(os.path.dirname(_PACKAGE)), d, "") for d in ("sbp", "passes", "runtime")
)

# A compiled program is the user's: its lines are theirs, not those of this package that traced it.
for _path in {_PACKAGE, os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep}:
    source_info_util.register_exclusion(_path)


def frames(source_info: SourceInfo) -> Iterator[tuple[str, int, str]]:
    """The Python frames (file, line, function) of an equation, innermost first, without JAX's own."""
    for frame in source_info_util.user_frames(source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def user_line(source_info: SourceInfo) -> tuple[str, int] | None:
    """The innermost frame in a file of the user's: not of an installed library, not of this package."""
    return next(((file, line) for file, line, _ in frames(source_info) if is_user_file(file)), None)


@cache
def is_user_file(file: str) -> bool:
    """Whether a file is the user's: not of an installed library, not of this package."""
    return not os.path.realpath(file).startswith((*_LIBRARIES, *_OWN, _STDLIB))


@cache
def is_own_file(file: str) -> bool:
    """Whether a file is of this package."""
    return os.path.realpath(file).startswith(_OWN)


def any_line(source_info: SourceInfo) -> tuple[str, int] | None:
    """The innermost frame outside JAX, libraries included."""
    return next(((file, line) for file, line, _ in frames(source_info)), None)


def is_of_jax(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr is the trace of one of JAX's own functions, such as that of `jnp.where`."""
    _, _, place = str(jaxpr.debug_info.func_src_info).rpartition(" at ")
    return place.startswith(_JAX)


def scope_of(source_info: SourceInfo) -> str:
    """The name stack, such as `jvp(layer0)/attention`."""
    return str(source_info.name_stack)


def inlined_source(outer: SourceInfo | None, source_info: SourceInfo, own_frames: bool) -> SourceInfo:
    """The source info of an equation of an inlined call: its names behind those of the call.

    Arguments:
      outer: the source info of the call; None for none.
      own_frames: whether the equation keeps its Python frames; else it gets those of the call.
    """
    if outer is None:
        return source_info
    frames = source_info.traceback if own_frames else outer.traceback
    return source_info_util.SourceInfo(frames, outer.name_stack + source_info.name_stack)


def inside_call(outer: SourceInfo | None, eqn: JaxprEqn) -> SourceInfo | None:
    """The source info of an inlined call, with JAX's name for the inside; None stays None."""
    name = eqn.primitive.name
    called = f"jit({eqn.params['name']})" if name in ("jit", "pjit") else _CALLED.get(name)
    return outer.replace(name_stack=outer.name_stack.extend(called)) if called and outer else outer


def inside_loop(outer: SourceInfo | None) -> SourceInfo | None:
    """The source info of a loop or a branch, for its inside: there, names start anew."""
    return outer and outer.replace(name_stack=source_info_util.new_name_stack())


def definition(fn: Callable[..., PyTree]) -> SourceInfo | None:
    """The source info of the line where a function is defined; None if there is none."""
    found: Any = inspect.unwrap(fn)
    while isinstance(found, functools.partial):
        found = inspect.unwrap(found.func)
    code = getattr(found, "__code__", None) or getattr(found.__call__, "__code__", None)
    if code is None:
        return None
    here = compile("frames()", code.co_filename, "eval").replace(
        co_name=code.co_name, co_qualname=code.co_qualname, co_firstlineno=code.co_firstlineno
    )
    with partial_eval_internal.TracebackScope():
        frames = eval(here, {"frames": source_info_util.Traceback.get_traceback})
    return source_info_util.SourceInfo(frames, source_info_util.new_name_stack())


# JAX keeps what it has traced of its own functions, with the line of who called them first: not across lines.
_make_context: Any = jax.make_user_context
_line = _make_context("")


@contextlib.contextmanager
def source_context(source_info: SourceInfo | None, scope: str = "") -> Iterator[None]:
    """A context that gives traced ops the frames and names of an equation, and a scope."""
    names, frames, line = source_info_util.current_name_stack(), None, ""
    if source_info is not None:
        names, frames = names + source_info.name_stack, source_info.traceback
        line = str(user_line(source_info))
    names = names.extend(scope) if scope else names
    with source_info_util.user_context(frames, name_stack=names), _line(line):
        yield


def operands_of(eqn: JaxprEqn) -> list[Aval]:
    """Shapes and dtypes of an equation's operands, without the shardings of a user's mesh."""
    return [
        jax.core.ShapedArray(a.shape, a.dtype, a.weak_type) if type(a) is jax.core.ShapedArray else a
        for a in (v.aval for v in eqn.invars)
    ]


def sub_jaxpr(params: dict[str, Any], key: str) -> tuple[Jaxpr, Sequence[ArrayLike]]:
    """The jaxpr that a call-like equation holds under `key`, and its constants."""
    inner = params[key] if key in params else params["jaxpr"]  # of a composite in jax 0.10
    return getattr(inner, "jaxpr", inner), tuple(getattr(inner, "consts", ()))


def without_unused(closed: ClosedJaxpr) -> tuple[Jaxpr, Sequence[ArrayLike]]:
    """The jaxpr of a function without unused ops, inside loops too; and its constants."""
    kept, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return kept, closed.consts


def target_of(primitive: str, params: Mapping[str, Any]) -> str:
    """The kernel or function that a call calls, if it is known; "" for any other primitive."""
    if primitive == "pallas_call":
        named = params.get("name") or getattr(params.get("name_and_src_info"), "name", "")
        return str(named or "")
    if primitive == "ffi_call":
        return str(params["target_name"])
    if primitive == "composite":
        return str(params["name"])
    if primitive in CUSTOM.values():
        jaxpr = params["call_jaxpr"]
        return str(getattr(jaxpr, "jaxpr", jaxpr).debug_info.func_src_info or "")
    return ""


def custom_call(fn: Callable[..., PyTree]) -> str | None:
    """The op of a call of a `custom_vjp` or `custom_jvp` function; None for anything else."""
    primitive = CUSTOM.get(type(fn))
    return f"{primitive}[{api_util.fun_sourceinfo(fn)}]" if primitive else None


def is_call_of(fn: Callable[..., PyTree], eqn: JaxprEqn) -> bool:
    """Whether an equation calls `fn`: functions of one line may close over different values."""
    if eqn.params.get("num_consts"):
        return False
    again = jax.make_jaxpr(fn)(*operands_of(eqn)).jaxpr.eqns
    return len(again) == 1 and str(again[0].params["call_jaxpr"]) == str(eqn.params["call_jaxpr"])


def shard_map_specs(params: Mapping[str, Any]) -> tuple[Jaxpr, dict[str, int], list[DimAxes], list[DimAxes]]:
    """Body, manual mesh axes, and per operand and result the axes of each dim, of a `shard_map` equation."""

    def spec(p: PartitionSpec) -> DimAxes:
        return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in p]

    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    sizes = {name: size for name, size in params["mesh"].shape.items() if name in manual}
    jaxpr = params["jaxpr"]
    specs = ([spec(p) for p in params[key]] for key in ("in_specs", "out_specs"))
    return getattr(jaxpr, "jaxpr", jaxpr), sizes, *specs


def scan_counts(params: Mapping[str, Any], n_operands: int) -> tuple[int, int]:
    """The number of constants, and of carried operands, of a scan; the rest are scanned."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update(range(n_operands)).unpack()  # jax 0.12
    return len(list(consts)), len(list(carry))


def bind(primitive: Bindable, args: Sequence[ArrayLike], params: dict[str, Any]) -> list[jax.Array]:
    """Binds a primitive with an equation's parameters; always a list of results."""
    if primitive.name in ("reduce_max", "reduce_min"):
        params = {**_extremum_params(), **params}
    out = primitive.bind(*args, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


@cache
def _extremum_params() -> dict[str, Any]:
    """The parameters of `lax.reduce_max` besides axes; jax 0.12 misses one in `shard_map`."""
    eqn = jax.make_jaxpr(lambda x: jax.lax.reduce_max(x, (0,)))(np.zeros(1, np.float32)).eqns[0]
    return {k: v for k, v in eqn.params.items() if k != "axes"}


def is_ordered(params: Mapping[str, Any]) -> bool:
    """Whether an op with these parameters has an ordered effect."""
    effect = params.get("effect")
    ordered = effect is not None and effects.ordered_effects.contains(effect)
    return bool(ordered or params.get("ordered"))


def trace_context() -> tuple[Hashable, ...]:
    """All settings that a trace depends on, as in the keys of `jax.jit`; and the kind of new random keys."""
    return (*config.trace_context(), setting("jax_default_prng_impl"))


def barrier_primitive() -> Primitive:
    """The optimisation barrier's primitive."""
    made: Primitive = jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0].primitive
    return made


def make_primitive(
    name: str,
    *,
    jvp: Callable[..., Any],
    transpose: Callable[..., Any] | None,
    batch: Callable[..., Any],
) -> Bindable:
    """An identity primitive of one operand with the given transformation rules."""
    p: Bindable = Primitive(name)
    p.def_impl(lambda x, **_: x)
    p.def_abstract_eval(lambda x, **_: x)
    ad.primitive_jvps[p] = jvp
    if transpose is not None:
        ad.primitive_transposes[p] = transpose
    batching.primitive_batchers[p] = batch
    mlir.register_lowering(p, lambda ctx, x, **_: [x])
    return p


def make_op(name: str, fun: Callable[..., Sequence[jax.Array]]) -> Bindable:
    """A primitive with the results of `fun`, a list; parameters are keywords.

    It has no derivative and no batching rule: passes make such ops after JAX's transformations.
    """
    p: Bindable = Primitive(name)
    p.multiple_results = True

    def abstract(*avals: jax.core.ShapedArray, **params: Any) -> list[jax.core.ShapedArray]:
        args = [struct(x.shape, x.dtype) for x in avals]
        shapes = jax.eval_shape(lambda *args: list(fun(*args, **params)), *args)
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes]

    p.def_impl(lambda *args, **params: list(fun(*args, **params)))
    p.def_abstract_eval(abstract)
    mlir.register_lowering(p, mlir.lower_fun(fun, multiple_results=True))
    return p


def holds_function(param: Any) -> bool:
    """Whether a parameter of an equation holds a function: a jaxpr, or a callable.

    Named tuples describe dims, or a kind of random key; types name a dtype.
    """
    if type(param) in (tuple, list):
        return any(map(holds_function, param))
    jaxpr = getattr(param, "jaxpr", param)
    return isinstance(jaxpr, Jaxpr) or (callable(param) and not isinstance(param, type | enum.Enum))


@cache
def is_key(dtype: DType) -> bool:
    """Whether a dtype is that of a typed PRNG key."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.extended))


@cache
def itemsize(dtype: DType) -> float:
    """Bytes of one element; a typed key counts its words, sub-byte types their share."""
    if is_key(dtype):
        return 4.0 * float(_implementation(dtype).key_shape[0])
    name = str(dtype)
    if name.endswith(("int4", "int2", "float4_e2m1fn")):
        return 0.5 if "4" in name else 0.25
    return float(dtype.itemsize)


def _implementation(key_dtype: Any) -> Any:
    """The implementation of keys of a dtype."""
    return key_dtype._impl


def zeros(shape: tuple[int, ...], dtype: DType) -> jax.Array:
    """An array of zeros; of keys, with words of zeros."""
    if not is_key(dtype):
        return jax.numpy.zeros(shape, dtype)
    impl = _implementation(dtype)
    words = jax.numpy.zeros((*shape, *impl.key_shape), np.uint32)
    keys: jax.Array = jax.random.wrap_key_data(words, impl=impl.name)
    return keys


def setting(name: str) -> Any:
    """One of JAX's settings."""
    config: Any = jax.config
    return getattr(config, name)


def is_partitionable_threefry(key_dtype: DType) -> bool:
    """Whether bits of this key are a function of the key and the logical position alone."""
    return _implementation(key_dtype) is threefry_prng_impl and bool(setting("jax_threefry_partitionable"))


def threefry(k1: ArrayLike, k2: ArrayLike, hi: ArrayLike, lo: ArrayLike) -> list[jax.Array]:
    """The threefry-2x32 block function on arrays of equal shape."""
    primitive: Any = primitives.threefry2x32_p
    out: list[jax.Array] = primitive.bind(k1, k2, hi, lo)
    return out
