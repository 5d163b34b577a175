"""A DLRM on eight H100s: 26 tables, 13.8 million rows, 65,536 clicks; rows that were looked up are trained.

python -m sbp plan docs/gallery/dlrm.py:train_step --donate 0,1 --open
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sbp
from models.dlrm import DLRM
from models.recommender.batch import Batch
from models.recommender.layers import Inputs
from models.recommender.learner import LAYOUTS, OPTIMIZERS, Learner, collection
from models.recommender.synthetic import CARDINALITIES, DENSE

CLICKS, WIDTH = 65_536, 128
SIZES = [100 * n for n in CARDINALITIES]
RULE = OPTIMIZERS["adagrad"]

train_step_placement = sbp.placement("h100", shape=(8,))
LEARNER = Learner(
    DLRM(bottom=(512, 256), top=(1024, 1024, 512, 256)),
    Inputs(DENSE, len(SIZES), WIDTH),
    collection(SIZES, WIDTH, LAYOUTS["rows"](8), 8),
    RULE.make(RULE.lr),
    optax.adam(2e-3),
)


def train_step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
    """One step on a batch of clicks."""
    return LEARNER.step(params, state, batch)


def train_step_args() -> tuple[Any, ...]:
    """Tables and nets, their state, and a batch, as shapes."""
    params = jax.eval_shape(LEARNER.init, jax.eval_shape(jax.random.key, 0))
    floats = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    keys = jax.ShapeDtypeStruct((CLICKS, len(SIZES)), jnp.int32)
    batch = Batch(floats((CLICKS,)), floats((CLICKS, DENSE)), keys)
    return params, jax.eval_shape(LEARNER.init_state, params), batch


def train_step_sbp(placement: sbp.Placement) -> Any:
    """Tables by rows, clicks by the batch."""
    return LEARNER.in_sbp(placement)


OTHERWISE = {"nothing said": {"in_sbp": None}}
