"""The train steps that are compiled for GPUs: cases in the size of the machine; only their shapes are made.

Batches grow with the devices, so that each has the same work on one host and on sixteen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sbp
from benchmarks import cases, maxtext
from benchmarks.cases import Case
from models import gpt, llama
from models.dlrm import DLRM
from models.recommender.batch import Batch
from models.recommender.layers import Inputs
from models.recommender.learner import LAYOUTS, OPTIMIZERS, Learner, collection
from models.recommender.synthetic import CARDINALITIES, DENSE

GPT = gpt.Config(width=1024, heads=16, vocabulary=51_200, sequence=1024, dropout=0.0)


def gpt_case(choice: str, shape: Sequence[int], layers: int, computed: Any = None) -> Case:
    """A GPT of width 1,024, 16 heads, vocabulary 51,200, 8 rows of 1,024 tokens a device, AdamW."""
    return cases.gpt_case(choice, shape, layers, replace(GPT, compute_dtype=computed), 8 * prod(shape))


def llama_case(config: llama.Config, rows: int, choice: str, shape: Sequence[int]) -> Case:
    """A Llama with `rows` sequences a device, AdamW.

    Where weights are split by width the peer is laid out as MaxText does: without constraints on activations
    XLA gathers those. Under "auto" it is data parallel.
    """
    optimizer = optax.adamw(1e-3)

    def make() -> tuple[Any, ...]:
        tokens = (rows * prod(shape), config.sequence + 1)
        batch = jax.random.randint(jax.random.key(0), tokens, 0, config.vocabulary)
        return cases.arguments(jax.jit(partial(llama.init, config=config)), optimizer, batch)

    in_sbp = llama.signatures(choice, shape, config, optimizer)
    case = Case(llama.make_train_step(config, optimizer), make, in_sbp)
    if choice in ("fsdp", "zero"):
        constrained = partial(maxtext.make_train_step, config, optimizer)
        return replace(case, peer_sbp=maxtext.signatures(shape, config, optimizer), peer_step=constrained)
    plain = llama.signatures("data", shape, config, optimizer)
    return replace(case, peer_sbp=plain if choice == "auto" else None)


def one_by_one(choice: str, shape: Sequence[int], layers: int) -> Case:
    """`layers` layers of Llama 3.2 1B, each by itself and not computed twice, 4 x 2,048 tokens a device."""
    config = replace(llama.PRESETS["1b"], layers=layers, sequence=2048, scan=False, remat=False)
    return llama_case(config, 4, choice, shape)


def stacked(choice: str, shape: Sequence[int], layers: int) -> Case:
    """The same in a scan, each computed twice."""
    return llama_case(replace(llama.PRESETS["1b"], layers=layers, sequence=2048), 4, choice, shape)


def llama70b_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """Llama 3 70B, 4,096 tokens a device."""
    return llama_case(replace(llama.PRESETS["70b"], sequence=4096), 1, choice, shape)


def dlrm_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """A DLRM with 26 tables of width 128, split as `choice` says, 8,192 clicks a device, Adagrad and Adam."""
    rule, rows, devices = OPTIMIZERS["adagrad"], 8192 * prod(shape), prod(shape)
    sizes = [100 * n for n in CARDINALITIES]
    learner = Learner(
        DLRM(bottom=(512, 256), top=(1024, 1024, 512, 256)),
        Inputs(DENSE, len(sizes), 128),
        collection(sizes, 128, LAYOUTS["rows" if choice == "auto" else choice](devices), devices),
        rule.make(rule.lr),
        optax.adam(2e-3),
    )

    def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
        return learner.step(params, state, batch)

    def make() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), len(sizes) + 1)
        ids = [jax.random.randint(k, (rows,), 0, n) for k, n in zip(keys[1:], sizes, strict=True)]
        batch = Batch(jnp.ones(rows), jnp.ones((rows, DENSE)), jnp.stack(ids, axis=1))
        params = jax.jit(learner.init)(keys[0])
        return params, jax.jit(learner.init_state)(params), batch, keys[0]

    placement = sbp.placement("h100", shape=tuple(shape))
    key = [sbp.B] * len(shape)
    lies = (*learner.in_sbp(placement), key)
    if choice != "auto":
        return Case(step, make, lies, None)
    chosen = [{**tree, "tables": sbp.AUTO} for tree in lies[:2]]
    return Case(step, make, (*chosen, *lies[2:]), lies)


def resnet_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """ResNet-50 of the published width, 32 images of 224 x 224 a device, momentum."""
    return cases.resnet_case(choice, shape, layers, cases.Images(32 * prod(shape), 224, 64, 1000))


def library_case(case: Callable[..., Case], choice: str, shape: Sequence[int], layers: int) -> Case:
    """A net of another library: 1,024 -> 8,192 -> 8,192 -> 1,000, 1,024 rows a device, AdamW."""
    return case(choice, shape, layers, cases.Net(1024, 8192, 1000, 1024 * prod(shape)))


LARGE: Mapping[str, Callable[[str, Sequence[int], int], Case]] = {
    "gpt": gpt_case,
    "gpt-bf16": partial(gpt_case, computed=jnp.bfloat16),
    "llama": one_by_one,
    "llama-scan": stacked,
    "llama70b": llama70b_case,
    "resnet": resnet_case,
    "dlrm": dlrm_case,
    "flax": partial(library_case, cases.flax_case),
    "equinox": partial(library_case, cases.equinox_case),
}
