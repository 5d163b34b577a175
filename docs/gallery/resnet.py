"""A ResNet-18 on eight H100s, its batch of 512 photographs split over them.

python -m sbp plan docs/gallery/resnet.py:train_step --donate 0,1 --open
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sbp
from models import resnet, train

CONFIG = resnet.DEPTHS[18]
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
IMAGES, SIDE = 512, 224

train_step = resnet.make_train_step(OPTIMIZER)
train_step_placement = sbp.placement("h100", shape=(8,))


def train_step_args() -> tuple[Any, ...]:
    """Parameters, momentum, images with labels, and a key, as shapes."""
    images = jax.ShapeDtypeStruct((IMAGES, SIDE, SIDE, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((IMAGES,), jnp.int32)
    return train.example(partial(resnet.init, config=CONFIG), OPTIMIZER, (images, labels))


def laid(choice: str, placement: sbp.Placement) -> Any:
    """The signatures of a parallelism by name."""
    return resnet.signatures(choice, placement.shape, CONFIG, OPTIMIZER)


train_step_sbp = partial(laid, "data")
OTHERWISE = {"batch given by rows of pixels": {"in_sbp": partial(laid, "spatial")}}
