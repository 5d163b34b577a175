"""A GPT of 4 layers in two stages on two hosts of eight H100s: 8 micro-batches, 1F1B, tensor parallel within.

python -m sbp plan docs/gallery/pipeline.py:train_step --donate 0,1 --schedule 1f1b --open
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sbp
from models import gpt, train
from models.pipeline import Pipeline

CONFIG = gpt.Config(
    layers=4, width=2048, heads=16, vocabulary=51_200, sequence=1024, dropout=0, compute_dtype=jnp.bfloat16
)
OPTIMIZER = optax.adamw(3e-4)
ROWS = 64

train_step_placement = sbp.placement("h100", shape=(2, 8), axes=("stage", "model"))
STAGES = train_step_placement.split("stage")
train_step = gpt.make_train_step(CONFIG, OPTIMIZER, Pipeline(STAGES, microbatches=8))


def train_step_args() -> tuple[Any, ...]:
    """Parameters, optimizer state, tokens and a key, as shapes."""
    tokens = jax.ShapeDtypeStruct((ROWS, CONFIG.sequence + 1), jnp.int32)
    return train.example(partial(gpt.init, config=CONFIG), OPTIMIZER, tokens)


def train_step_sbp(placement: sbp.Placement) -> Any:
    """Weights as Megatron lays them, over the eight GPUs of each stage."""
    return gpt.signatures("tensor", STAGES[0].shape, CONFIG, OPTIMIZER)


SCHEDULE = "1f1b"
OTHERWISE = {"schedule gpipe": {"schedule": "gpipe"}, "schedule zb-h1": {"schedule": "zb-h1"}}
