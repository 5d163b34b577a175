"""A GPT of 4 layers on two hosts of eight H100s: data parallel between them, tensor parallel within.

python -m sbp plan docs/gallery/gpt.py:train_step --donate 0,1 --open
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sbp
from models import gpt, train

CONFIG = gpt.Config(
    layers=4, width=2048, heads=16, vocabulary=51_200, sequence=1024, dropout=0, compute_dtype=jnp.bfloat16
)
OPTIMIZER = optax.adamw(3e-4)
ROWS = 64

train_step = gpt.make_train_step(CONFIG, OPTIMIZER)
train_step_placement = sbp.placement("h100", shape=(2, 8))


def train_step_args() -> tuple[Any, ...]:
    """Parameters, optimizer state, tokens and a key, as shapes."""
    tokens = jax.ShapeDtypeStruct((ROWS, CONFIG.sequence + 1), jnp.int32)
    return train.example(partial(gpt.init, config=CONFIG), OPTIMIZER, tokens)


def laid(choice: str, placement: sbp.Placement) -> Any:
    """The signatures of a parallelism by name."""
    return gpt.signatures(choice, placement.shape, CONFIG, OPTIMIZER)


train_step_sbp, data, zero = (partial(laid, choice) for choice in ("2d", "data", "zero"))
OTHERWISE = {"data parallel on all 16": {"in_sbp": data}, "ZeRO-3 on all 16": {"in_sbp": zero}}
