"""The words of messages about checkpoints, processes and training; what raises them is tested where it is."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sbp
from sbp.errors import KINDS, Problem
from sbp.runtime.arrays import messages as arrays
from sbp.runtime.arrays import state
from sbp.runtime.checkpoint import messages
from sbp.runtime.nan_checks import state_check
from sbp.runtime.processes import addressable
from sbp.runtime.storage.messages import lease_held, lease_lost
from sbp.runtime.training import messages as training

FOLDER = Path("runs/step_3")
CALLS: dict[str, tuple[Problem, str]] = {
    "a step that is there": (
        messages.step_exists(FOLDER),
        """runs/step_3
  got    a step that is there already
  legal  a new step
  why    a step is written once; the existing one might be the only copy
  try    another step or folder""",
    ),
    "a leaf that is no array": (
        arrays.no_array("['name']", "str: 'run'"),
        """state['name']
  got    str: 'run'
  legal  arrays of numbers, of truth values or of keys, and numbers of at most 64 bits
  why    a leaf is written as an array
  try    extra= takes it, if JSON can hold it: text, and the state of a NumPy generator""",
    ),
    "another state": (
        arrays.other_state(FOLDER, ["w: float32[8], float32[4] was saved"]),
        """runs/step_3
  got    w: float32[8], float32[4] was saved
  legal  the leaves that were saved
  why    a checkpoint is restored into a state of its own shape
  try    like=... of the model that was saved; only=... for a part of it, dtype=... for another precision""",
    ),
    "damage": (
        messages.damaged_step(FOLDER, [1, 2], "weights.bin: another checksum"),
        """runs/step_3
  got    weights.bin: another checksum
  legal  the files as they were written
  why    a checkpoint is restored completely or not at all; training must not continue with wrong weights
  try    restore(..., step=2)""",
    ),
    "the only step is damaged": (
        messages.damaged_step(FOLDER, [], "no manifest"),
        """runs/step_3
  got    no manifest
  legal  the files as they were written
  why    a checkpoint is restored completely or not at all; training must not continue with wrong weights
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
        addressable._uneven(sbp.placement("cpu", shape=(3,)), "x", Counter({0: 2, 1: 1})),
        """x, of which each process has its own rows
  got    cpu(x=3): 2 in process 0, 1 in process 1 of 1
  legal  as many devices of each process
  why    the rows of a process are brought to its own devices of the placement
  try    the whole argument in every process, without own_rows""",
    ),
    "rows of a number": (
        addressable._no_rows("x", np.asarray(1.0, np.float32)),
        """x
  got    float32[], of which this process is to have its own rows
  legal  arrays of at least one dim
  why    rows are dim 0
  try    a number that is the same in all processes as an argument of its own""",
    ),
    "NaN in training": (
        training.metric_not_finite(7, ["loss is nan"]),
        """step 7 of sbp.fit
  got    loss is nan
  legal  finite metrics
  why    all steps after NaN are NaN
  try    Options(debug_nans=True) names the op that made it; a smaller learning rate; \
on_nonfinite=sbp.training.NonFinitePolicy(max_rollbacks=3) goes back to the last good step""",
    ),
    "a batch that does not come": (
        training.batch_awaited(8, 60.0, is_saved=True),
        """the batch of step 8
  got    nothing after 60 s
  legal  a batch, or the end of them
  why    a feed that hangs would stop the run for good; the state is saved
  try    batch_seconds=... if it may take longer; the feed, its files and its threads""",
    ),
    "a part that is not there": (
        arrays.no_part(FOLDER, ("ema",), ("['params']", "['opt']")),
        """runs/step_3
  got    only=('ema',)
  legal  one of ['params'], ['opt']
  why    only= takes the key of a part, or a tuple of keys, outermost first
  try    only=... one of these""",
    ),
    "a folder that is not shared": (
        messages.not_shared(FOLDER),
        """runs/step_3
  got    nothing there in this process
  legal  what process 0 has made there
  why    all processes write into one folder, and process 0 reads what they have written
  try    a folder on a file system that all hosts share, or an object store""",
    ),
    "a storage that lists late": (
        messages.not_listed(FOLDER, ["ocdbt.process_1"]),
        """runs/step_3
  got    no ocdbt.process_1
  legal  what all processes have written
  why    the storage has not listed it in time
  try    to save again""",
    ),
    "a folder of another run": (
        lease_held(Path("runs"), "process 7 on b", 60.0),
        """runs
  got    held by process 7 on b, which lives after 60 s of waiting
  legal  a folder of its own for each run
  why    two writers of one folder would delete each other's steps
  try    another folder, or the end of that run""",
    ),
    "a folder that another run has taken": (
        lease_lost(Path("runs"), "process 7 on b"),
        """runs
  got    taken over by process 7 on b
  legal  a folder that is still this run's
  why    this process was silent for so long that it was taken for dead; the step does not count
  try    one run per folder""",
    ),
    "a state that is not finite": (
        state_check._not_finite("step 3", [("['w']", "nan")]),
        """step 3
  got    ['w'] (nan)
  legal  leaves that are finite, as they were
  why    every run that goes on from it is lost; it was not so in the last good step
  try    an older step; exempt=['opt_state/*'] for leaves that may be so""",
    ),
    "no step to go on from": (
        training.no_good_step("runs", ["step 2: cut", "step 1: ['w'] is nan"]),
        """runs
  got    step 2: cut; step 1: ['w'] is nan
  legal  a step that is intact and good
  why    a run does not start anew over existing steps
  try    another copy of the folder; or an empty folder, to start anew""",
    ),
    "other vocabularies": (
        training.other_vocabularies(2, 1),
        """sbp.fit(..., batches)
  got    1 vocabularies in the batches, 2 in the step
  legal  as many as were saved
  why    keys would be given other rows than they were trained in
  try    the batches that it was trained with""",
    ),
    "what differs between processes": (
        training.extra_differs(["position"]),
        """sbp.fit(..., extra=...)
  got    other values of position in another process
  legal  the same in every process
  why    only process 0's value is kept, and a run may continue with another number of processes
  try    a function of the step, or a feed with batches_from, if each process reads its own data""",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_words(name: str) -> None:
    problem, text = CALLS[name]
    error: Any = KINDS[problem.kind](problem)
    assert str(error) == text
