"""Plans with stages made again around a tensor: the same figures whoever asks, of the whole schedule."""

import pickle
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, P, S
from sbp.errors import MemoryLimitError
from sbp.passes.face import Plan
from sbp.signature import NdSbp
from tests.options import options_of

GRID = sbp.placement("h100", shape=(2, 4), axes=("stage", "data"))
FRONT, BACK = GRID.split("stage")
MICROBATCHES = 4


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = {"layers": [array(512, 1024), array(1024, 512)]}, array(4096, 512), array(4096, 512)


def step(params: Any, x: Any, y: Any, hold: NdSbp | None = None) -> Any:
    def loss(params: Any, x: Any, y: Any) -> Any:
        with sbp.on(FRONT):
            hidden = jnp.tanh(x @ params["layers"][0])
            hidden = hidden if hold is None else sbp.annotate(hidden, hold)
        with sbp.on(BACK):
            return jnp.mean((jnp.sin(hidden) @ params["layers"][1] - y) ** 2)

    whole = sbp.microbatch(jax.value_and_grad(loss), MICROBATCHES, batch_args=(1, 2))
    value, grads = whole(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def planned(fn: Any = step, placement: Any = GRID, given: Any = None, **options: Any) -> Plan:
    program = sbp.compile(fn, placement, options=options_of(**options), **(given or {}))
    plan = program.plan(*ARGS)
    assert plan.stages
    return plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def sent(plan: Plan, tensor: str = "tanh") -> str:
    """What the front sends, as the plan of the back calls it."""
    return next(p for p in plan.stages[1].in_paths if p.startswith(f"from stage 0: {tensor}"))


def figures(plan: Plan) -> tuple[float, float, float, float]:
    return plan.seconds, plan.step_seconds, plan.wire_bytes, plan.memory_bytes


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["params['layers'][0]", "y", "tanh", "sin", "sent"])
def test_every_alternative_is_the_plan_that_holds_it(plan: Plan, name: str) -> None:
    name = sent(plan) if name == "sent" else name
    choices = plan.why(name)
    steps = [held.figures.step_seconds for held in choices.alternatives]
    assert steps == sorted(steps) and len(steps) >= 2
    assert choices.signatures[0] not in [held.signature for held in choices.alternatives]
    for held in choices.alternatives:
        other = plan.what_if(name, held.signature)
        assert other.stages and other.timeline is not None
        found = held.figures
        assert figures(other) == pytest.approx(
            (found.seconds, found.step_seconds, found.wire_bytes, found.memory_bytes), rel=1e-9
        )


def test_an_argument_is_held_as_in_sbp_holds_it(plan: Plan) -> None:
    assert plan.in_sbp[plan.in_paths.index("y")] != (S(1),)
    other = plan.what_if("y", [S(1)])
    said = planned(given={"in_sbp": (sbp.AUTO, sbp.AUTO, [S(1)])})
    assert figures(other) == pytest.approx(figures(said), rel=1e-9)
    assert other.in_sbp[other.in_paths.index("y")] == (S(1),)
    assert other.notes[0].startswith("what if: y, float32[4096, 512] held to [S(1)]: ")
    assert "arguments with other signatures" in plan.diff(other)


def test_what_an_op_makes_is_held_as_annotate_holds_it(plan: Plan) -> None:
    for nd in ((S(1),), (S(0),)):
        other = plan.what_if("tanh", nd)
        said = planned(lambda p, x, y, nd=nd: step(p, x, y, nd))
        # The user's annotation also is an op of its backward; it costs nothing there.
        assert other.seconds == pytest.approx(said.seconds, rel=1e-4)
        assert other.wire_bytes == pytest.approx(said.wire_bytes, rel=1e-9)
        assert other.timeline is not None and said.timeline is not None
        assert other.timeline.makespan == pytest.approx(said.timeline.makespan, rel=1e-4)


def test_what_is_sent_is_held_on_both_ends(plan: Plan) -> None:
    choices = plan.why(sent(plan))
    assert choices.where == "sent by placement 0; received by placement 1" and choices.alike == 1
    assert len(choices.signatures) == 2 and choices.tensor.endswith(", float32[1024, 1024]")
    for held in choices.alternatives:
        other = plan.what_if(sent(plan), held.signature)
        assert other.stages
        (send,) = (c for c in other.sends if c.tensor == "tanh")
        assert send.before == send.after == held.signature and send.count == MICROBATCHES
    # Whichever end names it.
    name = next(p for p in plan.stages[0].out_paths if p.startswith("to stage 1: tanh"))
    assert figures(plan.what_if(name, [B])) == figures(plan.what_if(sent(plan), [B]))


def test_only_what_changes_is_planned_again(plan: Plan) -> None:
    other = plan.what_if("y", [S(1)])
    assert other.stages
    first, again = plan.stages[0], other.stages[0]
    assert again.physical is first.physical and other.stages[1].physical is not plan.stages[1].physical


def test_what_is_held_stays_held(plan: Plan) -> None:
    first = plan.what_if("x", [B])
    second = first.what_if("tanh", [S(1)])
    assert second.in_sbp[second.in_paths.index("x")] == (B,)
    assert second.why("x").signatures == ((B,),) and second.why("tanh").signatures[-1] == (S(1),)


def test_stages_and_phases_are_named(plan: Plan) -> None:
    assert plan.why("tanh", most=1).where == "stage 0, forward, on placement 0"
    assert plan.why("cos", most=1).where in (
        "stage 1, forward, on placement 1",
        "stage 1, backward, on placement 1",
    )
    line = step.__code__.co_firstlineno + 10
    tensor = f"update of params['layers'][*] at test_stages_replanner.py:{line}, float32[512, 1024]"
    choices = plan.why(tensor, most=1)
    assert choices.where.startswith("update, on placement") and choices.where in str(choices)


def test_tensors_of_both_stages_are_held_together() -> None:
    square = {"layers": [array(512, 512)] * 2}, *ARGS[1:]
    plan = sbp.compile(step, GRID).plan(*square)
    choices = plan.why("params['layers'][*]")
    assert choices.alike == 2 and choices.where == "on placement 0; on placement 1"
    for held in choices.alternatives:
        other = plan.what_if("params['layers'][*]", held.signature)
        assert other.in_sbp[:2] == other.out_sbp[:2] == (held.signature,) * 2
        assert other.seconds == pytest.approx(held.figures.seconds, rel=1e-9)


def forward(params: Any, x: Any, y: Any) -> Any:
    with sbp.on(FRONT):
        hidden = jnp.tanh(x @ params["layers"][0])
    with sbp.on(BACK):
        return jnp.sum((hidden @ params["layers"][1] - y) ** 2)


def test_without_microbatches() -> None:
    plan = planned(forward)
    assert plan.schedule is None
    for name in ("tanh", next(p for p in plan.stages[1].in_paths if "tanh" in p)):
        held = plan.why(name).alternatives[0]
        other = plan.what_if(name, held.signature)
        assert other.step_seconds == pytest.approx(held.figures.step_seconds, rel=1e-9)
    assert plan.why("tanh").where.endswith("on placement 0")


def test_a_model_that_is_cut_keeps_its_cut() -> None:
    def whole(params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any, x: Any, y: Any) -> Any:
            hidden = jnp.tanh(x @ params["layers"][0])
            return jnp.mean((hidden @ params["layers"][1] - y) ** 2)

        return sbp.microbatch(jax.grad(loss), MICROBATCHES, batch_args=(1, 2))(params, x, y)

    plan = planned(whole, stages=2, schedule="auto", memory_limit="200 MB")
    held = plan.why("y").alternatives[0]
    other = plan.what_if("y", held.signature)
    assert other.stages and other.figures and len(other.stages) == 2
    assert other.seconds == pytest.approx(held.figures.seconds, rel=1e-9)


@pytest.mark.full
def test_a_limit_is_kept_by_what_if_and_said_by_why() -> None:
    given = {"in_sbp": (sbp.AUTO, [S(0)], sbp.AUTO)}
    roomy = planned(given=given)
    tight = planned(given=given, memory_limit=f"{roomy.memory_bytes * 1.001:.0f} B")
    (over,) = (h for h in tight.why("x").alternatives if h.signature == (B,))
    assert over.figures.memory_bytes > tight.why("x").limit_bytes and "does not fit" in str(tight.why("x"))
    with pytest.raises(MemoryLimitError):
        tight.what_if("x", [B])


def test_ends_of_other_hierarchies_lie_as_each_likes() -> None:
    wide = sbp.placement("h100", shape=(6,), axes=("data",))
    front = replace(wide, ranks=(0, 1, 2, 3), shape=(4,))
    back = replace(wide, ranks=(4, 5), shape=(2,))

    def unequal(params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any, x: Any, y: Any) -> Any:
            with sbp.on(front):
                hidden = jnp.tanh(x @ params["layers"][0])
            with sbp.on(back):
                return jnp.mean((hidden @ params["layers"][1] - y) ** 2)

        return sbp.microbatch(jax.grad(loss), MICROBATCHES, batch_args=(1, 2))(params, x, y)

    plan = planned(unequal, wide)
    assert plan.why(sent(plan)).where == "received by placement 1"
    other = plan.what_if(sent(plan), [B])
    assert other.stages
    send, before = (next(c for c in p.sends if c.tensor == "tanh") for p in (other, plan))
    assert send.after == (B,) and send.before == before.before


def test_copies_cannot_be_made_again(plan: Plan) -> None:
    again = planned()
    assert again == plan and again.replanner is not None
    with pytest.raises(sbp.SbpError, match="without its program"):
        plan.stages[0].why("x")
    loose = replace(plan, physical=None, stages=())
    with pytest.raises(sbp.SbpError, match="without its program"):
        pickle.loads(pickle.dumps(loose)).why("x")


@pytest.mark.parametrize(
    ("name", "nd", "complaint"),
    [
        ("parms['layers'][0]", [B], "nearest: params['layers'][0]"),
        ("dot_general", [B], "tensors of different kinds"),
        ("x", [B, B], "2 signatures"),
        ("x", [S(5)], "splits a dim that a tensor of 2 dims does not have"),
        ("y", [P], "P never crosses the boundary"),
        ("sent", [P], "P never crosses the boundary"),
        ("tanh", [S(2)], "splits a dim"),
    ],
)
def test_what_cannot_be(plan: Plan, name: str, nd: Any, complaint: str) -> None:
    with pytest.raises(sbp.SbpError) as caught:
        plan.what_if(sent(plan) if name == "sent" else name, nd)
    assert complaint in str(caught.value)


def test_what_is_sent_is_even() -> None:
    args = {"layers": [array(512, 1022), array(1022, 512)]}, *ARGS[1:]
    plan = sbp.compile(step, GRID).plan(*args)
    assert plan.stages
    with pytest.raises(sbp.SbpError, match="only even shards are"):
        plan.what_if(sent(plan), [S(1)])
    assert all(held.signature != (S(1),) for held in plan.why(sent(plan)).alternatives)
