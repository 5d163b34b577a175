"""A step in the order of XLA's scheduler: what is hidden, what is exposed, what is copied at its end."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.hardware.catalogue import Hardware, hardware_for
from sbp.passes.boxing.links import Network
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.physical import step_schedule
from sbp.passes.physical.evaluate import Evaluator, executions
from sbp.passes.physical.fusion import op_of
from sbp.passes.physical.program import Box, Compute
from sbp.rates.beliefs import UNKNOWN_SECONDS

WIDTH, ROWS, LAYERS = 8192, 65536, 6
H100 = sbp.placement("h100", shape=(8,))
CLOSE = 1e-9


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# Small collectives that cost little: with those of a real chip, so small programs would have none.
FLAT = sbp.Options(hardware=replace(hardware_for("h100"), chip=""))


def planned(
    fn: Callable[..., Any], args: Sequence[Any], in_sbp: Any, devices: sbp.Placement = H100, **more: Any
) -> PlanData:
    return sbp.compile(fn, devices, in_sbp=in_sbp, **more).plan(*args)


def evaluator(plan: PlanData) -> Evaluator:
    assert plan.physical is not None
    return Evaluator(plan.physical, Network(plan.placement, plan.hardware))


def evaluator_of(takes: Evaluator) -> Evaluator:
    """One that knows nothing yet of the same program."""
    return replace(takes, facts=takes.facts)


def kernel_seconds(plan: PlanData) -> float:
    """What is computed, by the evaluator's own figures."""
    takes, total = evaluator(plan), 0.0
    for e in executions(takes.physical.steps):
        if isinstance(e.step, Compute):
            sent = sum(seconds for _, seconds in takes.communication_times(e.step))
            total += e.assumed_count * (takes.seconds_of(e.step) - sent)
        elif isinstance(e.step, Box) and not takes.box_bytes(e.step):
            total += e.assumed_count * takes.seconds_of(e.step)
    return total


def check(plan: PlanData) -> None:
    """What must hold of every plan."""
    kernels = kernel_seconds(plan)
    assert kernels * (1 - CLOSE) <= plan.step_seconds <= plan.seconds * (1 + CLOSE)
    assert plan.step_seconds == pytest.approx(kernels + plan.exposed_seconds)
    for c in plan.collectives:
        assert 0.0 <= c.exposed_seconds <= c.seconds * (1 + CLOSE)


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


def columns(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(w @ x)
    return jnp.mean(x)


def train(ws: Any, x: Any) -> Any:
    """A step of data parallel training that wants whole gradients."""
    gs = [sbp.annotate(g, [B]) for g in jax.grad(columns)(ws, x)]
    return [w - 0.1 * g for w, g in zip(ws, gs, strict=True)]


def with_momentum(ws: Any, ms: Any, x: Any) -> Any:
    gs = jax.grad(loss)(ws, x)
    ms = [0.9 * m + g for m, g in zip(ms, gs, strict=True)]
    return [w - 0.1 * m for w, m in zip(ws, ms, strict=True)], ms


WEIGHTS, IMAGES = [array(WIDTH, WIDTH)] * 2, array(ROWS, WIDTH)


def of(plan: PlanData, kind: str, tensor: str = "") -> list[Collective]:
    return [c for c in plan.collectives if c.kind == kind and tensor in c.tensor]


def test_gradients_are_hidden_in_the_backward_pass_but_for_the_last() -> None:
    """One update of a weight is left to compute when the last one is there."""
    plan = planned(train, (WEIGHTS, array(WIDTH, ROWS)), ([B], [S(1)]))
    check(plan)
    exposed = [c.exposed_seconds / c.seconds for c in of(plan, "all_reduce")]
    assert len(exposed) == 2 and min(exposed) == 0.0 and max(exposed) > 0.7


def test_new_weights_are_gathered_when_nothing_is_left_to_compute() -> None:
    args = WEIGHTS, WEIGHTS, IMAGES
    plan = planned(with_momentum, args, ([B], [S(0)], [S(0)]), donate_argnums=(0, 1))
    check(plan)
    gathered, scattered = of(plan, "all_gather"), of(plan, "reduce_scatter")
    assert len(gathered) == len(scattered) == 2
    exposed = sorted(c.exposed_seconds / c.seconds for c in gathered)
    assert exposed[-1] > 0.9
    assert min(c.exposed_seconds for c in scattered) == 0.0 < max(c.exposed_seconds for c in scattered)


def test_small_collectives_are_sent_as_one() -> None:
    """One latency, not one for each."""
    ws = [array(256, 256)] * 8
    plan = planned(train, (ws, array(256, 1 << 17)), ([B], [S(1)]), options=FLAT)
    check(plan)
    sums = of(plan, "all_reduce")
    assert len(sums) == 8
    assert sum(c.exposed_seconds for c in sums) < 0.4 * sum(c.seconds for c in sums)


def scanned(ws: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])


def test_a_trip_of_a_loop_waits_for_what_it_hands_on() -> None:
    """The sum over a split width ends a trip, and the next one begins with it."""

    def fn(ups: Any, downs: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, (ups, downs))[0]

    args = array(LAYERS, WIDTH, WIDTH), array(LAYERS, WIDTH, WIDTH), array(2048, WIDTH)
    plan = planned(fn, args, ([S(2)], [S(1)], [B]), out_sbp=[B])
    check(plan)
    (total,) = of(plan, "all_reduce")
    assert total.count == LAYERS and total.exposed_seconds == pytest.approx(total.seconds)


def test_what_is_only_stacked_is_sent_in_the_next_trip() -> None:
    """XLA's collective pipeliner; after the last trip there is no other."""

    def fn(ws: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            y = jnp.tanh(x @ w)
            return y, sbp.annotate(x.T @ y, [S(0)])

        return lax.scan(layer, x, ws)[1]

    args = array(LAYERS, WIDTH, WIDTH), IMAGES
    plan = planned(fn, args, ([B], [S(0)]), out_sbp=[S(1)])
    check(plan)
    (scatter,) = [c for c in of(plan, "reduce_scatter") if c.count == LAYERS]
    assert scatter.exposed_seconds == pytest.approx(scatter.seconds / LAYERS)


def test_branches_count_as_in_the_serial_time() -> None:
    def fn(w: Any, x: Any) -> Any:
        return lax.cond(jnp.sum(x) > 0, lambda x: x @ w, lambda x: x, x)

    plan = planned(fn, (array(WIDTH, WIDTH), IMAGES), ([S(1)], [S(1)]), out_sbp=[S(1)])
    check(plan)


def test_an_op_that_talks_is_partly_a_collective() -> None:
    """The carry of a cumulative sum is sent when the local sums are there."""

    def fn(x: Any, y: Any) -> Any:
        return jnp.cumsum(x, 0), y @ y.T

    args = array(ROWS, 4096), array(WIDTH, WIDTH)
    plan = planned(fn, args, ([S(0)], [B]), out_sbp=([S(0)], [S(1)]))
    check(plan)
    (carry,) = plan.collectives
    assert carry.exposed_seconds == 0.0 < carry.seconds
    assert plan.step_seconds == pytest.approx(plan.seconds - carry.seconds)


def test_between_hosts_too() -> None:
    devices = sbp.placement("h100", shape=(2, 8))
    plan = planned(jax.grad(loss), (WEIGHTS, array(2 * ROWS, WIDTH)), ([B, B], [S(0), S(0)]), devices)
    check(plan)
    assert plan.step_seconds < plan.seconds


def test_the_scheduler_knows_hosts_of_eight() -> None:
    """An all-reduce over all of 16 hosts is 127 / 8 rounds of 37 us, twice, and the bytes (in XLA's log
    1,491.6 us); over one device of each it is 15 rounds. More groups than 8 are unknown to it."""
    devices = sbp.placement("h100", shape=(16, 8))
    takes = evaluator(planned(jax.grad(loss), (WEIGHTS, IMAGES), ([B, B], [S(0), S(0)]), devices))
    wire_bytes = 2 * 127 / 128 * 25_188_352
    assert takes.network.believed_seconds("all_reduce", (0, 1), wire_bytes) == pytest.approx(
        1491.6e-6, rel=1e-3
    )
    assert 1.1e-3 < takes.network.believed_seconds("all_reduce", (0,), 1000.0) < 1.2e-3
    assert takes.network.believed_seconds("all_gather", (1,), 7 / 8 * 2**18) == pytest.approx(32.96e-6)
    many = sbp.placement("h100", shape=(4, 4, 8))
    takes = evaluator(planned(jax.grad(loss), (WEIGHTS, IMAGES), ([B, B, B], [S(0), S(0), S(0)]), many))
    found = {takes.network.believed_seconds("all_reduce", (1,), n) for n in (1e3, 1e9)}
    assert found == {UNKNOWN_SECONDS}


def test_what_nothing_is_known_of_is_believed_to_take_what_it_takes() -> None:
    plan = planned(jax.grad(loss), (WEIGHTS, IMAGES), ([B], [S(0)]), options=FLAT)
    takes = evaluator(plan)
    for kind, wire_bytes in (("all_reduce", 1e3), ("permute", 1e8)):
        taken = takes.network.collective_seconds(kind, (0,), wire_bytes)
        assert takes.network.believed_seconds(kind, (0,), wire_bytes) == taken > 0
    ops = [op_of(s, takes.physical) for s in takes.physical.steps if isinstance(s, Compute)]
    product = next(op for op in ops if op.name == "dot_general")
    assert takes.scheduled_seconds(product) == pytest.approx(
        2 * ROWS / 8 * WIDTH * WIDTH / plan.hardware.flops(4)
    )


def test_collectives_that_are_sent_as_one_are_one_to_the_scheduler() -> None:
    devices = sbp.placement("h100", shape=(2, 8))
    takes = evaluator(planned(jax.grad(loss), (WEIGHTS, IMAGES), ([B, B], [S(0), S(0)]), devices))
    found = [op_of(s, takes.physical) for s in takes.physical.steps if isinstance(s, Box)]
    first, second = (op for op in found if op.sends)
    alone, rounds = takes.scheduled_seconds(first), takes.network.believed_seconds("all_reduce", (0, 1), 1.0)
    # Equal ones, whose rounds are gone through once.
    assert alone == takes.scheduled_seconds(second) > 2 * rounds
    assert takes.scheduled_seconds(first, second) == pytest.approx(2 * alone - rounds, rel=0.01)


def test_the_same_halo_is_sent_once() -> None:
    """Two convolutions ask for the same rows of a neighbour; the serial time has them twice."""

    def fn(x: Any, v: Any, w: Any) -> Any:
        def conv(k: Any) -> Any:
            return lax.conv_general_dilated(x, k, (1, 1), "SAME")

        return conv(v) + conv(w)

    args = array(8, 16, 256, 256), array(16, 16, 3, 3), array(16, 16, 3, 3)
    plan = planned(fn, args, ([S(2)], [B], [B]), out_sbp=[S(2)])
    check(plan)
    halos = [c for c in plan.collectives if c.kind == "permute"]
    assert halos and sum(c.seconds for c in halos) < plan.seconds - kernel_seconds(plan)


def test_nothing_overlaps_on_cpus() -> None:
    plan = planned(train, (WEIGHTS, array(WIDTH, ROWS)), ([B], [S(1)]), sbp.placement("cpu", shape=(8,)))
    assert plan.step_seconds == plan.seconds and not plan.overlaps
    assert all(c.exposed_seconds == pytest.approx(c.seconds) for c in plan.collectives)


def test_one_device_waits_for_nobody() -> None:
    plan = planned(train, (WEIGHTS, array(WIDTH, ROWS)), ([B], [B]), sbp.placement("h100", shape=(1,)))
    check(plan)
    assert plan.exposed_seconds == 0.0 and plan.step_seconds == pytest.approx(plan.seconds)


@pytest.mark.parametrize("lying", [[S(0), B], [B, S(1)], [S(0), S(1)]])
def test_whatever_the_signatures(lying: Any) -> None:
    devices = sbp.placement("h100", shape=(2, 4))
    plan = planned(
        lambda w, x: jnp.sum(jnp.tanh(x @ w)), (array(64, 64), array(64, 64)), (lying, [B, B]), devices
    )
    check(plan)


def momentum(w: Any, m: Any, x: Any) -> Any:
    """A step whose gradient is a product as it is, which no transpose follows."""
    m = 0.9 * m + jnp.einsum("ri,rj->ij", x, jnp.tanh(x @ w))
    return w - 0.1 * m, m


def updated(lies: Any) -> Evaluator:
    """Of a step whose gradient is scattered along some dim to state that lies so."""
    args = array(WIDTH, WIDTH), array(WIDTH, WIDTH), array(ROWS, WIDTH)
    plan = planned(momentum, args, (lies, lies, [S(0)]), donate_argnums=(0, 1))
    assert plan.physical is not None
    return Evaluator(plan.physical, Network(plan.placement, plan.hardware), plan.donated)


def test_a_step_is_what_is_computed_and_what_is_waited_for() -> None:
    plan = planned(train, (WEIGHTS, array(WIDTH, ROWS)), ([B], [S(1)]))
    takes = evaluator(plan)
    found = takes.schedule
    assert found.seconds == plan.step_seconds
    assert found.seconds == pytest.approx(kernel_seconds(plan) + found.exposed_seconds)
    assert found.seconds <= takes.seconds() * (1 + 1e-9)


def test_an_order_in_sections_that_is_shorter_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = evaluator(planned(train, (WEIGHTS, array(WIDTH, ROWS)), ([B], [S(1)])))
    order, usual = takes.whole.order, takes.schedule
    begun = [event for event in order.events if event[1]]
    at_once = [(j, b) for j, _ in begun for b in ((True, False) if order.nodes[j].sends else (True,))]
    orders = [order, replace(order, events=at_once)]  # the second waits for all that it sends

    def found() -> float:
        monkeypatch.setattr(step_schedule, "_orders", lambda *_: orders)
        return evaluator_of(takes).schedule.seconds

    longer = found()
    assert longer > usual.seconds
    orders.reverse()
    assert found() == longer


def test_what_only_passes_by_a_part_costs_nothing() -> None:
    """A stage may hand on what it was given, and none of its ops reads."""
    takes = evaluator(planned(train, (WEIGHTS, array(WIDTH, ROWS)), ([B], [S(1)])))
    steps, ends = (
        takes.physical.steps,
        list(zip(takes.physical.graph.outputs, takes.physical.outputs, strict=True)),
    )
    made = [(x, nd) for x, nd in ends if isinstance(x, int)]
    assert takes.part_seconds(steps, [*made, (len(takes.physical.graph.values), (B,))]) == takes.part_seconds(
        steps, made
    )


def test_what_is_turned_over_is_copied_at_the_end() -> None:
    """The weight and its moment are written apart, and copied to where they belong."""
    along_rows, along_columns = (updated([S(d)]) for d in (0, 1))
    shard = WIDTH * WIDTH * 4 / 8
    for takes, copies in ((along_rows, 0), (along_columns, 2)):
        assert takes.timeline is not None
        end = max(end for _, _, end, _ in takes.timeline[1].spans)
        assert takes.schedule.seconds == pytest.approx(end + copies * takes.copy_seconds(shard))


def test_a_reader_of_a_gather_waits_for_it() -> None:
    """One product is all that there is: nothing runs beside what it needs."""
    plan = planned(lambda w, x: x @ w, (array(WIDTH, WIDTH), IMAGES), ([S(0)], [S(0)]), out_sbp=[S(0)])
    (gather,) = plan.collectives
    assert gather.kind == "all_gather" and gather.exposed_seconds == pytest.approx(gather.seconds)


class Crowded(Hardware):
    """A chip whose kernels have half of it while a collective runs."""

    @property
    def beside_share(self) -> float:
        return 0.5


def test_kernels_have_less_of_a_chip_beside_a_collective() -> None:
    """What runs beside it takes twice as long, and so does no more than half of the time that it hid."""
    plan = planned(train, (WEIGHTS, array(WIDTH, ROWS)), ([B], [S(1)]))
    alone = evaluator(plan)
    assert plan.physical is not None
    same = {f.name: getattr(plan.hardware, f.name) for f in fields(plan.hardware)}
    crowded = Evaluator(plan.physical, Network(plan.placement, Crowded(**same)))
    assert alone.whole.order.events == crowded.whole.order.events
    sent = sum(c.seconds for c in plan.collectives)
    found, before = crowded.schedule, alone.schedule
    hidden = sent - found.exposed_seconds
    lost = found.seconds - found.exposed_seconds - (before.seconds - before.exposed_seconds)
    assert lost == pytest.approx(hidden / 2) and hidden > 0
