"""What is done to a folder in a history."""

from __future__ import annotations

import time

from tests.runtime.checkpoint.histories.folder import harmed
from tests.runtime.checkpoint.histories.history import MOST_STEPS, History, Operation, Saver
from tests.runtime.checkpoint.histories.processes import Gone

MOST_OPERATIONS = 120
"""On files, in a save: about as many as there are."""
MOST_SECONDS = 0.06
"""That a save takes."""


def steps_after(history: History, saver: Saver) -> list[int]:
    """The steps of one to three saves: the next ones of a training, or any."""
    rng = history.rng
    first = (saver.head or 0) + rng.randint(1, 2) if rng.random() < 0.8 else rng.randint(1, MOST_STEPS)
    return [first + i for i in range(rng.choice([1, 1, 2, 3]))]


def save(history: History) -> None:
    """Some steps are saved."""
    saver = history.current()
    steps = steps_after(history, saver)
    plan = history.planned(saver, steps)
    history.begin_saving(saver, plan, steps)
    history.expect_saved(saver, plan, saver.process.end())


def go_back(history: History) -> None:
    """Training goes back to an older step, and saves."""
    if history.content.finished:
        history.go_back(history.current(), history.rng.choice([*history.content.finished]))
    save(history)


def end(history: History) -> None:
    """The saver ends while it saves nothing."""
    history.lose_owner()


def kill_at_operation(history: History) -> None:
    """A saver is killed at an operation on files."""
    _cut_short(history, ["kill", history.rng.randint(1, MOST_OPERATIONS)])


def kill_at_moment(history: History) -> None:
    """A saver is killed at some moment."""
    _cut_short(history, None)


def _cut_short(history: History, fault: list[object] | None) -> None:
    saver = history.current()
    steps = steps_after(history, saver)
    plan = history.planned(saver, steps)
    history.begin_saving(saver, plan, steps, fault)
    if fault is None:
        time.sleep(history.rng.uniform(0, MOST_SECONDS * len(steps)))
        saver.process.kill()
    try:
        answer = saver.process.end() if fault is not None else None
    except Gone:
        saver.process.kill()
        answer = None
    if answer is not None:  # there were fewer operations
        history.expect_saved(saver, plan, answer)
        return
    history.say(f"  process {saver.process.pid} was killed")
    history.owner = None
    history.adopt([stage for stages in plan.stages for stage in stages])


def fail(history: History) -> None:
    """An operation on files fails once."""
    _with_fault(history, "fail")


def full(history: History) -> None:
    """From one operation on, nothing can be written any more."""
    _with_fault(history, "full")


def _with_fault(history: History, name: str) -> None:
    saver = history.current()
    steps = steps_after(history, saver)
    plan = history.planned(saver, steps)
    history.begin_saving(saver, plan, steps, [name, history.rng.randint(1, MOST_OPERATIONS)])
    history.expect_saved(saver, plan, saver.process.end(), may_fail=True)


def fill(history: History) -> None:
    """The disk is full, and then it is not."""
    saver = history.current()
    if history.disk is None:
        return
    steps = steps_after(history, saver)
    plan = history.planned(saver, steps)
    left_bytes = history.rng.choice([0, 4096, 8192, 16384, 32768, 65536])
    history.disk.fill(left_bytes)
    try:
        history.begin_saving(saver, plan, steps)
        history.say(f"  with {left_bytes} bytes left")
        history.expect_saved(saver, plan, saver.process.end(), may_fail=True)
    finally:
        history.disk.free()


def harm(history: History) -> None:
    """A file of a step is cut, changed or removed."""
    if not history.content.finished:
        return
    step = history.rng.choice([*history.content.finished])
    said, part = harmed(history.folder, step, history.rng)
    history.say(f"step {step}: {said}")
    history.is_harmed = True
    content = history.content
    history.content = content.without(step) if part == "gone" else content.harmed(step, part)


def note(history: History) -> None:
    """Somebody leaves a note in a step."""
    if history.content.finished:
        step = history.rng.choice([*history.content.finished])
        history.foreign.add(f"step_{step:08d}/note{history.tags}.txt", "mine")
        history.say(f"a note in step {step}")


def intrude(history: History) -> None:
    """Another process would save there, and is refused while the owner lives."""
    history.current().process.ask("prepare")
    other = history.saver(wait=0.3)
    history.go_back(other, max(history.content.finished, default=None))
    step = (other.head or 0) + 1
    answer = other.process.ask("save", steps=[step], tags=[10**6])
    history.say(f"  told {answer}")
    assert "which lives after" in answer["error"], answer
    other.process.kill()


def stop(history: History) -> None:
    """A saver is silent for so long that another one takes over; then it goes on."""
    saver = history.current()
    saver.process.ask("prepare")
    steps = steps_after(history, saver)
    plan = history.planned(saver, steps)
    history.begin_saving(saver, plan, steps, ["stop", history.rng.randint(1, MOST_OPERATIONS)])
    if not saver.process.has_stopped():
        history.expect_saved(saver, plan, saver.process.end())
        return
    history.adopt([stage for stages in plan.stages for stage in stages])
    other = history.saver(dead=0.4)
    history.owner = other
    history.go_back(other, max(history.content.finished, default=None))
    save(history)
    other.process.ask("times", wait=20.0, dead=10.0)
    history.check()
    saver.process.go_on()
    answer = saver.process.end()
    history.say(f"  process {saver.process.pid} goes on: {answer}")
    # A file system knows no owners: who was stopped between its look at the lease and the name that it was
    # about to change changes that one. So it may set one step aside; it deletes nothing.
    there = history.content
    history.adopt([there, *(there.without(step, is_kept=True) for step in sorted(there.finished))])
    history.check()
    if history.rng.random() < 0.5:
        saver.process.ask("close")
    saver.process.kill()


OPERATIONS: dict[Operation, int] = {
    save: 8,
    go_back: 4,
    end: 3,
    kill_at_operation: 6,
    kill_at_moment: 3,
    fail: 3,
    full: 2,
    fill: 2,
    harm: 3,
    note: 1,
    intrude: 1,
    stop: 2,
}
"""How often each thing is done."""
