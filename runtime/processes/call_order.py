"""All processes must call the same programs in the same order; an error needs proof.

If two processes run different programs at once, Python does not notice: gloo raises an error about sizes or
adds up unrelated values, and NCCL waits for ever. So each process publishes its calls now and then, and
compares them with those of process 0 and of the first process that has finished. A slow process has fewer
calls, but no other calls, so it is not an error.
"""

import time
from collections.abc import Iterable
from contextlib import suppress

import jax

from sbp.compat.errors import is_of_runtime
from sbp.compat.processes import KVStore
from sbp.errors import Problem, ProcessError
from sbp.runtime.processes.calls import ENDED, Calls, ask, first_end, published_history, words_of
from sbp.runtime.processes.flight_recorder import History
from sbp.runtime.processes.messages import another_call, no_such_call

ANSWER_SECONDS = 3.0
"""What an error of the runtime waits for the answers of other processes."""
STEP_SECONDS = 0.25


def publish_and_compare(kv_store: KVStore, index: int, calls: Calls) -> ProcessError | None:
    """Publishes the calls of this process, if there are new ones, and compares them with those of others.

    Arguments:
      index: of this process.
      calls: its own.
    """
    if calls.published_count != calls.count:
        calls.say(kv_store, index)
    with suppress(jax.errors.JaxRuntimeError):  # the service is gone
        return _compared(kv_store, index, calls.history, [0] if index else [])
    return None


def at_the_end(kv_store: KVStore, index: int, calls: Calls) -> ProcessError | None:
    """The same for a process at its end, which will make no more calls."""
    calls.say(kv_store, index)  # others may still wait for this one
    calls.say(kv_store, index, ENDED)  # where nobody has been here before
    with suppress(jax.errors.JaxRuntimeError):
        return _compared(kv_store, index, calls.history, [], ends=True)
    return None


def explain_error(
    error: BaseException, kv_store: KVStore, index: int, count: int, calls: Calls
) -> ProcessError | None:
    """The cause of an error of the runtime, if another process runs another program.

    Asks the others, and waits some seconds for their answers.

    Arguments:
      count: of processes.
    """
    if not is_of_runtime(error):
        return None
    calls.say(kv_store, index)
    history, until = calls.history, time.monotonic() + ANSWER_SECONDS
    others = [0] if index else range(1, count)
    with suppress(jax.errors.JaxRuntimeError):
        ask(kv_store, f"{index} after an error at {until}")
        while time.monotonic() < until:
            if found := _compared(kv_store, index, history, others):
                return found
            time.sleep(STEP_SECONDS)
    return None


def _compared(
    kv_store: KVStore, index: int, mine: History, others: Iterable[int], *, ends: bool = False
) -> ProcessError | None:
    """The first difference from the calls of other processes, and of the first process that has ended.

    Arguments:
      ends: whether this process is at its end too.
    """
    heard = [(other, published_history(kv_store, other)) for other in others]
    end = first_end(kv_store)
    for other, theirs in [*heard, *([end] if end is not None and end[0] != index else [])]:
        number = mine.parts_from(theirs)
        if number is not None:
            here, there = mine.at(number)[1], theirs.at(number)[1]
            told = words_of(kv_store, here), words_of(kv_store, there)
            return ProcessError(another_call(number, index, told[0], other, told[1], before=here == there))
    if end is None or end[1].count == mine.count:
        return None
    # By now each of them has made all of its calls that the other one has.
    if mine.count > end[1].count:
        return ProcessError(_missed(kv_store, index, mine, *end))
    return ProcessError(_missed(kv_store, *end, index, mine)) if ends else None


def _missed(kv_store: KVStore, index: int, longer: History, other: int, shorter: History) -> Problem:
    """The problem of a process that has ended without a call which another one has made."""
    number = max(shorter.count + 1, longer.call_numbers.start)
    return no_such_call(number, index, words_of(kv_store, longer.at(number)[1]), other, shorter.count)
