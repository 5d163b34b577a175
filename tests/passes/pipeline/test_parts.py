"""Where ops are, which stage and phase they belong to, and that the pieces of a program are all of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.options import PipelineOptions
from sbp.passes.pipeline.check import check_cuts
from sbp.passes.pipeline.edges import edges_of
from sbp.passes.pipeline.numbering import Item, StageFlow, runs_of_ranks
from sbp.passes.pipeline.op_placement import OpPlacements, find_places, loop_of, placements_of
from sbp.passes.pipeline.order import Order, find_order
from sbp.passes.pipeline.slots import Cut, SlotKind
from sbp.passes.pipeline.split import Splitter
from sbp.passes.pipeline.stages import Stages
from sbp.passes.pipeline.sums import split_sums, sums_of
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.role import Part, Phase
from sbp.passes.program.trace import trace
from sbp.passes.schedule.dataflow import Edge
from sbp.runtime.pipeline.program import CompiledPipeline

WHOLE = sbp.placement("cpu", shape=(4, 2), axes=("stage", "data"))
P = WHOLE.split("stage")
X = jax.ShapeDtypeStruct((8, 4), np.float32)
M = jax.ShapeDtypeStruct((4, 4), np.float32)


def parted(fn: Any, *args: Any, ranks: Any = None) -> tuple[Graph, OpPlacements, Order]:
    """A function with stages, placed and ordered."""
    graph = trace(fn, args, {}, []).graph
    placements = placements_of(graph)
    where = find_places(graph, placements)
    graph = split_sums(graph, where, find_order(graph, where, ranks))
    where = find_places(graph, placements)
    return graph, where, find_order(graph, where, ranks)


def inner(graph: Graph) -> list[Node]:
    """The ops of the loop over micro-batches."""
    loop = loop_of(graph)
    assert loop is not None
    return list(loop.bodies[0].nodes)


def batched(loss: Any, batch_args: Any = 1, **how: Any) -> Any:
    return sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=batch_args, **how)


def unet(w: Any, x: Any) -> Any:
    with sbp.on(P[0]):
        a = jnp.tanh(x @ w)
        side = jnp.sin(a @ w)
    with sbp.on(P[1]):
        b = jnp.tanh(a @ w)
    with sbp.on(P[2]):
        c = jnp.tanh(b @ w)
    with sbp.on(P[3]):
        return jnp.sum(c * side)


def compiled(fn: Any, *args: Any, schedule: str | None = None) -> Stages:
    built = sbp.compile(fn, WHOLE, options=sbp.Options(pipeline=PipelineOptions(schedule=schedule)))._prepare(
        args, {}
    )[1]
    assert isinstance(built, CompiledPipeline)
    return built.stages


# --- where --------------------------------------------------------------------------------------------------


def test_a_gradient_inside_of_the_forward_pass_is_forward() -> None:
    def loss(w: Any, x: Any) -> Any:
        with sbp.on(P[0]):
            slope = jax.grad(lambda v: jnp.sum(jnp.tanh(v @ w)))(x)
        with sbp.on(P[1]):
            return jnp.sum(slope**2)

    graph, _, order = parted(batched(loss), M, X)
    nested = [
        n for n in inner(graph) if n.source.scope.count("transpose(") and "transpose(" in n.source.scope
    ]
    assert {n.role.undoes for n in nested} == {True, False}
    assert order.stages == (0, 1)
    assert any(n.op == "dot_general" and order.parts[n.id, 0].phase is Phase.FORWARD for n in nested)


def test_cotangents_of_several_stages_are_added_where_they_are_wanted() -> None:
    graph, where, order = parted(batched(unet), M, X)
    made = {v for n in inner(graph) for v in n.outputs}
    sums = [n for n in inner(graph) if n.op == "add_any"]
    joined = [n for n in sums if len({where.home(x) for x in n.inputs if x in made}) > 1]
    assert [(where.nodes[n.id], order.parts[n.id, 0].at) for n in joined] == [({0}, 0)]


def test_what_depends_on_no_stage_is_computed_by_each_that_needs_it() -> None:
    def loss(w: Any, x: Any, key: Any) -> Any:
        keep = jax.random.bernoulli(key, 0.5, (4, 4))
        with sbp.on(P[0]):
            x = jnp.where(keep, x @ w, 0)
        with sbp.on(P[1]):
            return jnp.sum(jnp.where(keep, x @ w, 0))

    graph, where, _ = parted(batched(loss, (1, 2)), M, X, jax.random.key(0))
    (bits,) = [n for n in inner(graph) if n.op == "random_bits"]
    assert where.nodes[bits.id] == {0, 1}


# --- stages -------------------------------------------------------------------------------------------------

# name -> (ops as (place, what they wait for), their levels): a number is its position
FLOWS: dict[str, tuple[list[tuple[int, list[int]]], list[int]]] = {
    "a chain": ([(0, []), (1, [0]), (2, [1])], [0, 1, 2]),
    "a V": ([(0, []), (1, [0]), (0, [1])], [0, 1, 2]),
    "a side branch stays with its stage": ([(0, []), (0, [0]), (1, [0]), (2, [2, 1])], [0, 0, 1, 2]),
    "a mask goes where it is used": ([(0, []), (0, []), (1, [0]), (0, [2, 1])], [0, 2, 1, 2]),
    "a measure stays where it is made": ([(0, []), (0, [0]), (1, [0]), (0, [2])], [0, 0, 1, 2]),
    "what nobody waits for goes with the rest": ([(0, []), (1, []), (1, [0])], [0, 1, 1]),
    "what nobody feeds": ([(0, []), (2, []), (1, [0]), (3, [2, 1])], [0, 1, 1, 2]),
    "two towers": ([(0, []), (1, [0]), (2, []), (3, [1, 2])], [0, 1, 1, 2]),
}


@pytest.mark.parametrize("name", FLOWS)
def test_levels(name: str) -> None:
    ops, expected = FLOWS[name]
    items: list[Item] = [(i, place) for i, (place, _) in enumerate(ops)]
    before = {items[i]: [items[k] for k in sources] for i, (_, sources) in enumerate(ops)}
    after = {item: [u for u in items if item in before[u]] for item in items}
    level = StageFlow(items, before, after).levels()
    assert [level[i] for i in items] == expected


def test_ranks_in_a_row_are_counted() -> None:
    assert runs_of_ranks(()) == []
    assert runs_of_ranks((0, 1, 1, 1, 0, 0)) == [(0, 1), (1, 3), (0, 2)]


def test_a_schedule_that_comes_by_its_last_rank_twice_cuts_that_stage_in_equal_halves() -> None:
    def loss(w: Any, x: Any) -> Any:
        with sbp.on(P[0]):
            x = jnp.tanh(x @ w)
        with sbp.on(P[1]):
            for _ in range(4):
                x = jnp.tanh(x @ w)
        with sbp.on(P[0]):
            return jnp.sum(jnp.tanh(x @ w))

    assert parted(batched(loss), M, X)[2].stages == (0, 1, 0)
    graph, where, order = parted(batched(loss), M, X, ranks=(0, 1, 1, 0))
    assert order.stages == (0, 1, 1, 0)
    products = [n for n in inner(graph) if n.op == "dot_general"]
    count: dict[Part, int] = {}
    for n in products:
        for place in where.nodes[n.id]:
            part = order.parts[n.id, place]
            count[part] = count.get(part, 0) + 1
    assert [count[Part(Phase.FORWARD, s)] for s in range(4)] == [1, 2, 2, 1]
    # Each weight gradient is with the layer that it is of, and each gradient of an input too.
    assert [count[Part(Phase.WEIGHT, s)] for s in range(4)] == [1, 2, 2, 1]
    assert [count.get(Part(Phase.INPUT, s), 0) for s in range(4)] == [0, 2, 2, 1]


def test_edges_are_those_of_the_model_skips_too() -> None:
    for merged in (True, False):
        found = edges_of(compiled(batched(unet), M, X).cuts(merged))
        assert found == (Edge(0, 1), Edge(0, 3), Edge(1, 2), Edge(2, 3))


def test_a_value_that_needs_no_gradient_is_an_edge_without() -> None:
    def loss(w: Any, x: Any) -> Any:
        with sbp.on(P[0]):
            h, mask = x @ w, x[:, 0] > 0
        with sbp.on(P[1]):
            h = jnp.tanh(h @ w)
        with sbp.on(P[2]):
            return jnp.sum(jnp.where(mask[:, None], h, 0))

    assert edges_of(compiled(batched(loss), M, X).cuts(True)) == (Edge(0, 1), Edge(0, 2, False), Edge(1, 2))


# --- sums ---------------------------------------------------------------------------------------------------


def weight_of(w: Any, x: Any) -> Any:
    return jnp.sum(x > 0).astype(x.dtype)


@pytest.mark.parametrize("reduce", ["mean", weight_of], ids=["mean", "weighted"])
def test_the_gradient_of_a_weight_of_several_stages_has_a_sum_on_each(reduce: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        with sbp.on(P[0]):
            x = jnp.tanh(x @ w)
        with sbp.on(P[1]):
            return jnp.sum(jnp.tanh(x @ w.T))

    fn = sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=1, reduce=reduce)
    graph, where, _ = parted(fn, M, X)
    loop = loop_of(graph)
    assert loop is not None
    (body,) = loop.bodies
    n_const, n_carry = loop.params["num_consts"], loop.params["num_carry"]
    carried = [v for v in body.inputs[n_const : n_const + n_carry] if graph.values[v].shape == (4, 4)]
    assert sorted(tuple(where.values[v]) for v in carried) == [(0,), (1,)]
    places = {v: where.home(v) for n in body.nodes for v in n.outputs if v in where.values}
    for s in sums_of(body, carried):
        homes = {places[x] for x, _ in s.addends if isinstance(x, int)}
        assert len(homes) == 1


# --- pieces -------------------------------------------------------------------------------------------------


def test_every_op_has_one_part_on_each_of_its_placements() -> None:
    graph, where, order = parted(batched(unet), M, X)
    loop = loop_of(graph)
    for n in [*inner(graph), *(n for n in graph.nodes if n is not loop)]:
        assert {p for i, p in order.parts if i == n.id} == where.nodes[n.id]
    shares = Splitter(graph, where, order, 2).subgraphs()
    assert sorted(r for s in shares for r in s.results) == list(range(len(graph.outputs)))
    for s in shares:
        assert {v for v in s.micro_receives if any(v in t.micro_sends for t in shares if t is not s)} == set(
            s.micro_receives
        )


def without_step(c: Cut) -> Cut:
    piece = next(p for p in c.pieces if p.steps)
    pieces = [replace(p, steps=p.steps[1:]) if p is piece else p for p in c.pieces]
    return replace(c, pieces=tuple(pieces))


def without_read(c: Cut) -> Cut:
    piece = next(p for p in c.pieces if p.reads)
    pieces = [replace(p, reads=p.reads[1:]) if p is piece else p for p in c.pieces]
    return replace(c, pieces=tuple(pieces))


def without_write(c: Cut) -> Cut:
    piece = next(p for p in c.pieces if any(w.slot.kind is SlotKind.EACH for w in p.writes))
    kept = tuple(w for w in piece.writes if w.slot.kind is not SlotKind.EACH)
    return replace(c, pieces=tuple(replace(p, writes=kept) if p is piece else p for p in c.pieces))


def twice(c: Cut) -> Cut:
    return replace(c, pieces=(*c.pieces, c.pieces[-1]))


def backwards(c: Cut) -> Cut:
    """The forward of the stage called what runs after everything."""
    late = Part(Phase.AFTER, 9)
    return replace(
        c,
        pieces=tuple(replace(p, part=late) if p.part.phase is Phase.FORWARD else p for p in c.pieces),
    )


@pytest.mark.parametrize("harm", [without_step, without_read, without_write, twice, backwards])
def test_pieces_that_are_not_all_of_the_program_do_not_pass(harm: Callable[[Cut], Cut]) -> None:
    cuts = compiled(batched(unet), M, X).cuts(False)
    check_cuts(cuts)
    with pytest.raises(AssertionError):
        check_cuts([harm(cuts[0]), *cuts[1:]])


def test_an_unsent_value_does_not_pass() -> None:
    cuts = compiled(batched(unet), M, X).cuts(True)
    with pytest.raises(AssertionError, match="is not passed"):
        check_cuts([replace(cuts[0], micro_sends={}), *cuts[1:]])
