"""Random pipelines with splits that do not divide, and weights of several stages: equal to one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import AUTO, B, S
from sbp.options import PipelineOptions

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v")
SIZES = (3, 4, 5, 6, 7, 9)
"""Most of them do not divide by two."""


@dataclass(frozen=True)
class Drawn:
    """A program that was drawn.

    Arguments:
      visits: the placements that the stages are on, in order.
      signatures: of the weights by name, and of the batch.
    """

    step: Callable[..., Any]
    whole: sbp.Placement
    args: tuple[Mapping[str, Any], Any]
    signatures: tuple[Any, Any]
    schedule: str
    visits: tuple[int, ...]


def signature(rng: np.random.Generator, ndim: int, inner: int) -> Any:
    """AUTO, or one of a tensor of some dims along the axes of a stage."""
    if rng.random() < 0.2:
        return AUTO
    return [B if rng.random() < 0.3 else S(int(rng.integers(ndim))) for _ in range(inner)]


def drawn(seed: int) -> Drawn:
    """Two to four ranks of two or four devices; tied tables, shared weights, two to sixteen micro-batches."""
    rng = np.random.default_rng(seed)
    schedule = SCHEDULES[rng.integers(len(SCHEDULES))]
    ranks = int(rng.integers(2, 5))
    inner = (2, 2) if ranks == 2 and rng.random() < 0.4 else (2,)
    axes = ("stage", "data", "model")[: 1 + len(inner)]
    whole = sbp.placement("cpu", shape=(ranks, *inner), axes=axes)
    there = tuple(range(ranks))
    visits = {
        "interleaved": (*there, *there),
        "zb-v": (*there, *there[::-1]),
        "dualpipe-v": (*there, *there[::-1]),
    }
    stages = visits.get(schedule, there)
    width, rows, vocabulary = (int(rng.choice(SIZES)) for _ in range(3))
    microbatches = int(rng.choice([2, 3, 4, 5, 16]))
    if schedule in ("interleaved", "dualpipe-v"):  # a multiple of the ranks; of both directions of a V
        microbatches = ranks * int(rng.integers(2, 4))
    shared = sorted(rng.choice(len(stages), size=2, replace=False).tolist()) if rng.random() < 0.5 else []
    tied = rng.random() < 0.6
    params = {f"w{i}": rng.normal(size=(width, width)) for i in range(len(stages))}
    if rng.random() < 0.5:
        params |= {f"b{i}": rng.normal(size=width) for i in range(len(stages)) if rng.random() < 0.5}
    params |= {"shared": rng.normal(size=(width, width))} if shared else {}
    params |= {"table": rng.normal(size=(vocabulary, width))} if tied else {}
    count = microbatches * rows
    batch = rng.integers(0, vocabulary, (count, 4)) if tied else rng.normal(size=(count, width))
    placements = whole.split("stage")

    def loss(params: Any, batch: Any) -> Any:
        x = batch
        for i, at in enumerate(stages):
            with sbp.on(placements[at]):
                x = params["table"][batch[:, :-1]].mean(1) if tied and i == 0 else x
                x = jnp.tanh(x @ params[f"w{i}"] + params.get(f"b{i}", 0.0))
                x = x + x @ params["shared"] if i in shared else x
                if i + 1 == len(stages):
                    scores = x @ params["table"].T if tied else x
                    x = jnp.square(scores).mean() - scores[:, 0].mean()
        return x

    def step(params: Any, batch: Any) -> Any:
        value, grads = sbp.microbatch(jax.value_and_grad(loss), microbatches, batch_args=1)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    signatures = {k: signature(rng, x.ndim, len(inner)) for k, x in params.items()}
    of_batch = AUTO if rng.random() < 0.5 else signature(rng, 1, len(inner))
    return Drawn(step, whole, (params, batch), (signatures, of_batch), schedule, stages)


def check(seed: int) -> None:
    """One of them against one device."""
    one = drawn(seed)
    options = sbp.Options(check=True, cache=False, pipeline=PipelineOptions(schedule=one.schedule))
    got = sbp.compile(one.step, one.whole, in_sbp=one.signatures, options=options)(*one.args)
    wanted = jax.jit(one.step)(*one.args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.some(2)
def test_a_random_pipeline_is_the_function_on_one_device(seed: int, x64: None) -> None:
    check(seed)


def search(seeds: Sequence[int]) -> dict[int, str]:
    """What goes wrong, by seed."""
    found = {}
    for seed in seeds:
        try:
            check(seed)
        except Exception as e:
            found[seed] = f"{type(e).__name__}: {str(e)[:300]}"
            print(seed, found[seed], flush=True)
    return found


if __name__ == "__main__":
    import sys

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    print(len(search(range(*map(int, sys.argv[1:])))), "failed")
