"""Every message about programs with stages: where, got, legal, why, try."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.errors import AnnotationError, ArgumentError, PlacementError
from sbp.passes.schedule.orders import make
from tests.errors.messages import Messages, check_message
from tests.options import options_of

WHOLE = sbp.placement("cpu", shape=(2, 4), axes=("stage", "data"))
PARTS = WHOLE.split("stage")
X = np.ones((8, 8), np.float32)
W = np.ones((8, 8), np.float32)
W3 = np.ones((3, 8, 8), np.float32)


def model(w: Any, x: Any) -> Any:
    with sbp.on(PARTS[0]):
        x = jnp.tanh(x @ w)
    with sbp.on(PARTS[1]):
        return jnp.mean(x @ w)


def plan(fn: Any, on: Any = WHOLE, **options: Any) -> Any:
    """The plan of a function of weights and a batch."""
    return sbp.compile(fn, on, options=options_of(**options)).plan(W, X)


def train(n: int = 2, loss: Any = model) -> Any:
    return sbp.microbatch(jax.value_and_grad(loss), n, batch_args=1)


def inside(place: Any) -> Any:
    """A function with one op on a placement."""

    def fn(w: Any, x: Any) -> Any:
        with sbp.on(PARTS[0]):
            x = x @ w
        with sbp.on(place):
            return x + 1

    return fn


def torn(w: Any, x: Any) -> Any:
    def body(x: Any, _: Any) -> tuple[Any, None]:
        return model(w, x) + x, None

    return lax.scan(body, x, None, length=2)[0]


def of_three(w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])


def clipped(w: Any, x: Any) -> Any:
    """Gradients that are scaled for every micro-batch by the norm of all of them."""

    def grads(w: Any, x: Any) -> Any:
        def loss(a: Any, b: Any, x: Any) -> Any:
            with sbp.on(PARTS[0]):
                x = jnp.tanh(x @ a)
            with sbp.on(PARTS[1]):
                return jnp.mean(jnp.tanh(x @ b))

        a, b = jax.grad(loss, (0, 1))(w, w, x)
        with sbp.on(PARTS[0]):
            norm = jnp.sum(a * a)
        with sbp.on(PARTS[1]):
            return a, b / norm

    return sbp.microbatch(grads, 2, batch_args=1)(w, x)


def whole_line(w: Any, x: Any) -> Any:
    with sbp.on(sbp.placement("cpu", shape=(8,))):
        return x @ w


def unstaged(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w)


def twice(w: Any, x: Any) -> Any:
    return train()(w, x), train(4)(w, x)


DISJOINT = "parts of cpu(stage=2 x data=4) that have no device in common"
PART = "with sbp.on(placement.split('stage')[0]): ..."
MADE = "its order is made for that many, the same on each rank"
NAMES = "'gpipe', '1f1b', 'interleaved', 'zb-h1', 'zb-v', 'dualpipe-v', 'forward'"

MESSAGES: Messages = {
    "stages that overlap": (
        lambda: plan(inside(sbp.placement("cpu", [3, 4]))),
        PlacementError,
        "sbp.on(cpu(x=2, ranks [3, 4]))",
        "ranks [3, 4]",
        DISJOINT,
        "it shares devices with cpu(data=4)",
        PART,
    ),
    "a stage on other devices": (
        lambda: plan(inside(sbp.placement("cpu", [8, 9]))),
        PlacementError,
        "sbp.on(cpu(x=2, ranks [8, 9]))",
        "ranks [8, 9]",
        DISJOINT,
        "it has devices that the program's placement does not have",
        PART,
    ),
    "a stage that is the whole": (
        lambda: plan(inside(WHOLE)),
        PlacementError,
        "sbp.on(cpu(stage=2 x data=4))",
        "ranks [0, 1, 2, 3, 4, 5, 6, 7]",
        DISJOINT,
        "it is the program's own, of which the other stages are parts",
        PART,
    ),
    "a stage of another hierarchy": (
        lambda: plan(whole_line),
        PlacementError,
        "sbp.on(cpu(x=8))",
        "ranks [0, 1, 2, 3, 4, 5, 6, 7]",
        DISJOINT,
        "it has all the devices, in another hierarchy: compile on it instead",
        PART,
    ),
    "a loop over stages": (
        lambda: plan(torn),
        AnnotationError,
        "scan at {line}",
        "ops on cpu(data=4) ({line}) and cpu(data=4, ranks [4, 5, 6, 7]) ({line})",
        "ops of one placement",
        "a loop or a branch runs as a whole, on one placement",
        "write the layers of different stages one after the other; loop over those of one stage",
    ),
    "several loops over micro-batches": (
        lambda: plan(twice),
        AnnotationError,
        "{line} and {line}",
        "2 calls of what sbp.microbatch made",
        "one in a program with stages",
        "the micro-batches of one loop are what a schedule orders",
        "combine both functions into one, or compile two programs",
    ),
    "gradients that go the wrong way": (
        lambda: plan(clipped),
        AnnotationError,
        "stage 1 on cpu(data=4, ranks [4, 5, 6, 7])",
        "ops of its backward pass that wait for that of stage 0 on cpu(data=4)",
        "forward from stage to stage, and backward the other way",
        "a schedule runs the backward pass of a stage once per micro-batch, after those of later stages",
        "checkpoint each stage separately; do work on gradients of several stages after sbp.microbatch",
    ),
    "a checkpoint over stages": (
        lambda: plan(train(loss=jax.checkpoint(model))),
        AnnotationError,
        "stage 1 on cpu(data=4, ranks [4, 5, 6, 7])",
        "ops of its backward pass that wait for that of stage 0 on cpu(data=4)",
        "forward from stage to stage, and backward the other way",
        "a schedule runs the backward pass of a stage once per micro-batch, after those of later stages",
        "checkpoint each stage separately; do work on gradients of several stages after sbp.microbatch",
    ),
    "an unknown schedule": (
        lambda: plan(train(), schedule="1f1"),
        ArgumentError,
        "PipelineOptions(schedule=...)",
        "'1f1'",
        NAMES + ", 'auto', a Schedule, or None",
        "it says in which order the stages run",
        "'1f1b'",
    ),
    "something else for a schedule": (
        lambda: plan(train(), schedule=3),
        ArgumentError,
        "PipelineOptions(schedule=...)",
        "3",
        NAMES + ", 'auto', a Schedule, or None",
        "it says in which order the stages run",
        "'1f1b'",
    ),
    "a schedule without micro-batches": (
        lambda: plan(model, schedule="1f1b"),
        ArgumentError,
        "PipelineOptions(schedule=...)",
        "'1f1b'",
        "a program with sbp.microbatch",
        "a schedule orders micro-batches",
        "sbp.microbatch(jax.value_and_grad(loss), 8, batch_args=1)",
    ),
    "layers of a scan that stages do not divide": (
        lambda: sbp.compile(train(loss=of_three), WHOLE, options=options_of(stages=2)).plan(W3, X),
        AnnotationError,
        "PipelineOptions(stages=2)",
        "a scan over 3 layers, 2 placements along 'stage'",
        "a stage per placement, and layers that are a multiple of the stages",
        "the weights of all layers come back as one array, split by layers along that axis",
        "a first axis of 3, or layers one by one",
    ),
    "a schedule without stages": (
        lambda: plan(train(loss=unstaged), schedule="1f1b"),
        ArgumentError,
        "PipelineOptions(schedule=...)",
        "'1f1b'",
        "a program with stages",
        "a schedule says in which order stages run",
        "with sbp.on(placement.split(0)[0]): ... in the model, or PipelineOptions(stages=...)",
    ),
    "a schedule of an evaluation": (
        lambda: plan(train(), schedule="forward"),
        ArgumentError,
        "PipelineOptions(schedule='forward')",
        "a schedule without backward",
        "one of a training",
        "the program has gradients, which it would leave out",
        "'1f1b', or sbp.microbatch of the loss alone",
    ),
    "a schedule of another program": (
        lambda: plan(train(), schedule=make("1f1b", (0, 1), 4)),
        ArgumentError,
        "PipelineOptions(schedule='1f1b')",
        "stages on ranks (0, 1), 4 micro-batches",
        "stages on (0, 1), 2 micro-batches",
        "the schedule is of another program",
        "the schedule's name, or one made for these stages",
    ),
    "counted keys of stages": (
        lambda: plan(train(), count_keys=True),
        ArgumentError,
        "ExchangeOptions(count_keys=True)",
        "a program with stages",
        "a program of one placement for it",
        "exchanges inside of stages are not counted",
        "count in a program without sbp.on",
    ),
    "another program's plan": (
        lambda: plan(train(), plan=sbp.compile(unstaged, WHOLE).plan(W, X)),
        ArgumentError,
        "Options(plan=...)",
        "a program with stages",
        "a program of one placement for it",
        "the signatures of a plan are those of one placement",
        "in_sbp and out_sbp",
    ),
    "too few stages": (
        lambda: plan(train(), schedule="interleaved"),
        ArgumentError,
        "schedule 'interleaved'",
        "2 stages on 2 ranks",
        "2 or more per rank",
        MADE,
        "a multiple of 2 stages, 4 or more, or 'gpipe', which takes any number",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])
