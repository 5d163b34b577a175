"""What several processes say when they start again, and when one of them finds a NaN: by the launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp import B, S
from sbp.errors import NonFiniteError
from tests.runtime import starting
from tests.runtime.starting import BATCH, COMPILED, counted

CHECKED = sbp.Options(debug_nans=True)


def restarted(make: Any, layers: int, folder: Path) -> Any:
    """A program's loss, that of its file, and how many programs were compiled for the latter."""
    path, params = folder / f"{make.__name__}.sbpx", starting.weights(layers)
    program = make(sbp.Options(cache=folder))
    losses = [float(program(params, BATCH)[1])]
    program.save_executable(path)
    loaded = sbp.load_executable(path)
    with counted() as events:
        losses.append(float(loaded(params, BATCH)[1]))
    return *losses, events.get(COMPILED, 0)


def refused(call: Any) -> str:
    """The message of a NaN."""
    try:
        call()
    except NonFiniteError as e:
        return str(e)
    return "none"


def on_one_device() -> Any:
    x = np.ones((16, 4), np.float32)
    x[13] = -1  # device 6, of process 1
    eight = sbp.placement("cpu", shape=(8,))
    return sbp.compile(lambda x: jnp.sqrt(x) * 2, eight, in_sbp=([S(0)],), options=CHECKED)(x)


def in_a_stage() -> Any:
    place = sbp.placement("cpu", shape=(2, 4))
    first, second = place.split(0)

    def fn(x: Any) -> Any:
        with sbp.on(first):
            x = x * 2
        with sbp.on(second):
            return jnp.log(x)

    return sbp.compile(fn, place, in_sbp=([B],), options=CHECKED)(-np.ones((8, 4), np.float32))


def main(folder: str) -> None:
    """Prints what this process has to say."""
    said = {
        "whole": restarted(starting.whole, 2, Path(folder)),
        "staged": restarted(starting.staged, 4, Path(folder)),
        "device": refused(on_one_device),
        "stage": refused(in_a_stage),
    }
    Path(folder, f"said{jax.process_index()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
