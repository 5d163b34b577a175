"""The meter against bytes worked out by hand: programs that XLA compiled for eight CPU devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from sbp.runtime.hlo.meter import Meter, read_compiled

N = 16 * 24 * 4  # bytes of the (16, 24) float32 that most programs below hold on each device
LINE, GRID, CUBE = ({"d": 8}, {"d": 2, "m": 4}, {"a": 2, "b": 2, "c": 2})


def mesh_of(axes: dict[str, int]) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def meter_of(
    axes: dict[str, int], body: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.float32
) -> Meter:
    """Compile `body` under shard_map, every argument and result whole on each device."""
    mapped = jax.shard_map(body, mesh=mesh_of(axes), in_specs=Spec(), out_specs=Spec(), check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes or ((16, 24),)]
    return read_compiled(jax.jit(mapped).lower(*arguments).compile())


ALONE = {
    "all-reduce": (LINE, lambda x: lax.psum(x, "d"), ("all_reduce", 8, N, 2 * 7 / 8 * N)),
    "all-reduce, inner": (GRID, lambda x: lax.pmax(x, "m"), ("all_reduce", 4, N, 2 * 3 / 4 * N)),
    "all-reduce, outer": (GRID, lambda x: lax.psum(x, "d"), ("all_reduce", 2, N, N)),
    "all-reduce, both": (GRID, lambda x: lax.psum(x, ("d", "m")), ("all_reduce", 8, N, 2 * 7 / 8 * N)),
    "all-reduce, not adjacent": (
        CUBE,
        lambda x: lax.psum(x, ("a", "c")),
        ("all_reduce", 4, N, 2 * 3 / 4 * N),
    ),
    "all-reduce, listed groups": (
        LINE,
        lambda x: lax.psum(x, "d", axis_index_groups=[[0, 5], [1, 4], [2, 7], [3, 6]]),
        ("all_reduce", 2, N, N),
    ),
    "all-gather": (LINE, lambda x: lax.all_gather(x, "d", tiled=True), ("all_gather", 8, 8 * N, 7 * N)),
    "all-gather, new dim": (GRID, lambda x: lax.all_gather(x, "m", axis=1), ("all_gather", 4, 4 * N, 3 * N)),
    "all-gather, two axes": (CUBE, lambda x: lax.all_gather(x, ("b", "c")), ("all_gather", 4, 4 * N, 3 * N)),
    "reduce-scatter": (
        GRID,
        lambda x: lax.psum_scatter(x, "m", scatter_dimension=1, tiled=True),
        ("reduce_scatter", 4, N, 3 / 4 * N),
    ),
    "reduce-scatter, line": (
        LINE,
        lambda x: lax.psum_scatter(x, "d", tiled=True),
        ("reduce_scatter", 8, N, 7 / 8 * N),
    ),
    "all-to-all": (LINE, lambda x: lax.all_to_all(x, "d", 0, 1, tiled=True), ("all_to_all", 8, N, 7 / 8 * N)),
    "all-to-all, same dim": (
        GRID,
        lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True),
        ("all_to_all", 2, N, N / 2),
    ),
    "permute, ring": (
        LINE,
        lambda x: lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)]),
        ("permute", 8, N, N),
    ),
    "permute, one sends": (GRID, lambda x: lax.ppermute(x, "m", [(2, 3)]), ("permute", 2, N, N)),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_collective(name: str) -> None:
    axes, body, (kind, group, payload, wire) = ALONE[name]
    (found,) = meter_of(axes, body).collectives
    assert (found.kind, found.group_size, found.payload_bytes, found.count) == (kind, group, payload, 1)
    assert found.wire_bytes == pytest.approx(wire, rel=1e-12)
    assert "test_meter.py:" in found.source
    assert found.source.startswith("jit(")


@pytest.mark.parametrize(
    ("dtype", "size"), [(jnp.bool_, 1), (jnp.uint8, 1), (jnp.float16, 2), (jnp.int32, 4), (jnp.complex64, 8)]
)
def test_element_sizes(dtype: Any, size: int) -> None:
    meter = meter_of(LINE, lambda x: lax.all_gather(x, "d"), (5, 3), dtype=dtype)
    assert meter.by_kind() == {"all_gather": (1, 7 * 15 * size)}


def test_one_device_in_the_group_and_permutes_to_self_are_no_traffic() -> None:
    def body(x: Any) -> Any:
        x = lax.psum(x, "one") + lax.all_gather(x, "one", tiled=True)
        return lax.ppermute(x, "d", [(i, i) for i in range(8)])

    assert meter_of({"one": 1, "d": 8}, body).collectives == ()


def test_scan_inside_fori_loop_and_cond() -> None:
    def branchy(i: Any, x: Any) -> Any:
        small = lambda x: lax.psum(x, "d")  # noqa: E731  N
        large = lambda x: lax.all_gather(x, "m").sum(0)  # noqa: E731  3 N
        return lax.cond(x[0, 0] > i, small, large, x)

    def row(x: Any, _: None) -> tuple[Any, None]:
        return lax.psum(x, "m") * 0.5, None  # 1.5 N

    def outer(i: Any, x: Any) -> Any:
        x = lax.scan(row, x, None, length=7)[0]
        return branchy(i, lax.all_to_all(x, "m", 0, 0, tiled=True))

    meter = meter_of(GRID, lambda x: lax.fori_loop(2, 7, outer, x))
    assert meter.unknown_trip_counts == ()
    assert meter.by_kind() == {
        "all_gather": (5, 5 * 3 * N),
        "all_reduce": (35, 35 * 1.5 * N),
        "all_to_all": (5, 5 * 0.75 * N),
    }


def test_a_loop_of_unknown_length_counts_once_and_is_named() -> None:
    def run(x: Any) -> Any:
        return lax.while_loop(lambda x: lax.psum(x.sum(), "d") < 9, lambda x: lax.psum(x, "m") + 1, x)

    meter = meter_of(GRID, run)
    assert len(meter.unknown_trip_counts) == 1
    assert "test_meter.py" in meter.unknown_trip_counts[0]
    assert meter.by_kind() == {"all_reduce": (2, 1.5 * N + 4)}


def test_combined_collective_counts_every_operand() -> None:
    meter = meter_of(GRID, lambda x, y: lax.psum((x, y, y * 2), "m"), (16, 24), (5,))
    assert meter.wire_bytes == pytest.approx(1.5 * (N + 20 + 20))
    assert sum(c.payload_bytes for c in meter.collectives) == N + 40


def loss(params: dict[str, Any], batch: Any) -> Any:
    return jnp.mean((jnp.tanh(batch @ params["w1"]) @ params["w2"]) ** 2)


def compile_grads(mesh: Mesh, params: dict[str, Spec], batch: Spec) -> Meter:
    shapes = {"w1": (12, 32), "w2": (32, 8)}
    placed = functools.partial(NamedSharding, mesh)
    arguments = (
        {k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=placed(params[k])) for k, s in shapes.items()},
        jax.ShapeDtypeStruct((16, 12), jnp.float32, sharding=placed(batch)),
    )
    results = (placed(Spec()), {k: placed(v) for k, v in params.items()})
    return read_compiled(jax.jit(jax.value_and_grad(loss), out_shardings=results).lower(*arguments).compile())


def test_jit_data_parallel_all_reduces_the_gradients_and_the_loss() -> None:
    meter = compile_grads(mesh_of(LINE), {"w1": Spec(), "w2": Spec()}, Spec("d"))
    assert set(meter.by_kind()) == {"all_reduce"}
    assert meter.wire_bytes == pytest.approx(2 * 7 / 8 * 4 * (12 * 32 + 32 * 8 + 1))


def test_jit_megatron_all_reduces_one_activation() -> None:
    meter = compile_grads(mesh_of(GRID), {"w1": Spec(None, "m"), "w2": Spec("m", None)}, Spec("d"))
    activation = 2 * 3 / 4 * 4 * (8 * 8)  # (batch / 2, 8), over the four that split the hidden units
    gradients = 4 * (12 * 8 + 8 * 8 + 1)  # shards over the two data-parallel rows, and the loss
    assert meter.wire_bytes == pytest.approx(activation + gradients)
