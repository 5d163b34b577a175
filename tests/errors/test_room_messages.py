"""The words of messages about checkpoints, processes and training; what raises them is tested where it is."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sbp
from sbp.errors import KINDS, Problem
from sbp.runtime.checkpoint import messages, state
from sbp.runtime.fit import _not_finite
from sbp.runtime.processes import parts

FOLDER = Path("runs/step_3")
CALLS: dict[str, tuple[Problem, str]] = {
    "a step that is there": (
        messages.there(FOLDER),
        """runs/step_3
  got    a step that is there already
  legal  a new step
  why    a step is written once: what is there might be the only copy
  try    another step or folder""",
    ),
    "another state": (
        messages.other_state(FOLDER, ["w: float32[8], float32[4] was saved"]),
        """runs/step_3
  got    w: float32[8], float32[4] was saved
  legal  the leaves that were saved
  why    a checkpoint is restored into a state of its own shape
  try    like=... of the model that was saved""",
    ),
    "damage": (
        messages.damaged(FOLDER, [1, 2], "weights.bin: another checksum"),
        """runs/step_3
  got    weights.bin: another checksum
  legal  the files as they were written
  why    a checkpoint is restored whole or not at all: other weights would train on without a word
  try    restore(..., step=2)""",
    ),
    "the only step is damaged": (
        messages.damaged(FOLDER, [], "no manifest"),
        """runs/step_3
  got    no manifest
  legal  the files as they were written
  why    a checkpoint is restored whole or not at all: other weights would train on without a word
  try    another copy: the folder has no other step""",
    ),
    "no arguments": (
        state._no_arguments("step", ["params", "x"], ["weights"]),  # type: ignore[arg-type]
        """restore(..., like=program)
  got    a checkpoint of weights
  legal  a dict by names of its arguments (params, x), or a tuple of the first ones
  why    like=step means its arguments
  try    like=program.abstract_args[0], or another tree of them""",
    ),
    "uneven processes": (
        parts._uneven(sbp.placement("cpu", shape=(3,)), "x", Counter({0: 2, 1: 1})),
        """x, of which each process has its own rows
  got    cpu(x=3): 2 in process 0, 1 in process 1 of 1
  legal  as many devices of each process
  why    the rows of a process are brought to its own devices of the placement
  try    the whole argument in every process, without own_rows""",
    ),
    "rows of a number": (
        parts._no_rows("x", np.asarray(1.0, np.float32)),
        """x
  got    float32[], of which this process is to have its own rows
  legal  arrays of at least one dim
  why    rows are dim 0
  try    a number that is the same in all processes as an argument of its own""",
    ),
    "NaN in training": (
        _not_finite(7, ["loss is nan"]),
        """step 7 of sbp.fit
  got    loss is nan
  legal  finite metrics
  why    what comes after NaN is NaN
  try    Options(debug_nans=True) names the op that made it; or a smaller learning rate""",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_words(name: str) -> None:
    problem, text = CALLS[name]
    error: Any = KINDS[problem.kind](problem)
    assert str(error) == text
