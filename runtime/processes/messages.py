"""What is said where processes do not call the same programs in the same order."""

from collections.abc import Sequence

from sbp.errors import Problem

SAME_CALLS = "the same calls of the same programs in every process, in one order"
PAD = "as many batches of the same shapes in every process: the last one of an epoch padded or dropped in all"
MOST_ARGUMENTS = 3
"""That are written of a call."""


def call_text(words: Sequence[str], beside: Sequence[str] = ()) -> str:
    """A call in words, with the arguments that are not as in another one; all where there is none.

    >>> other = "step", "w: float32[8]", "x: float32[13, 4]"
    >>> call_text(("step", "w: float32[8]", "x: float32[16, 4]"), other)
    'step(x: float32[16, 4])'
    """
    if not words:
        return "another program"
    name, *arguments = words
    if len(beside) == len(words):
        arguments = [x for x, y in zip(arguments, beside[1:], strict=True) if x != y] or arguments
    more = [f"{len(arguments) - MOST_ARGUMENTS} more"] if len(arguments) > MOST_ARGUMENTS else []
    return f"{name}({', '.join([*arguments[:MOST_ARGUMENTS], *more])})"


def another_call(
    number: int, index: int, words: Sequence[str], other: int, others: Sequence[str], *, before: bool
) -> Problem:
    """What is wrong where a call is of another program than in another process.

    Arguments:
      number: of the call.
      index, words: of this process, and what it calls.
      other, others: of the other one.
      before: whether this call is the same, and the first that differed is forgotten.
    """
    here, there = call_text(words, others), call_text(others, words)
    if here == there:
        there = f"{there} with other constants or code"
    return Problem(
        "process",
        f"call {number} of process {index}, {here}",
        f"other calls before it in process {other}" if before else f"{there} in process {other}",
        SAME_CALLS,
        "their collectives wait for each other for ever, or add up unrelated values",
        PAD,
    )


def no_such_call(number: int, index: int, words: Sequence[str], other: int, count: int) -> Problem:
    """What is wrong where a process has come to its end without a call that another one makes.

    Arguments:
      number, index, words: of the call, and who makes it.
      other: who has ended.
      count: how many calls that one has made.
    """
    return Problem(
        "process",
        f"call {number} of process {index}, {call_text(words)}",
        f"process {other} has come to its end after {count} calls",
        SAME_CALLS,
        "its collectives wait for the other process for ever",
        PAD,
    )


def gone_on(index: int, waits: Sequence[str], other: int, runs: Sequence[str]) -> Problem:
    """What is wrong where a process waits for one that runs something else.

    Arguments:
      index: of the process that waits, for what `waits` says.
      other: the one that runs.
    """
    return Problem(
        "process",
        f"process {index}, waiting for {', '.join(waits)}",
        f"process {other} has gone on with {', '.join(runs)}",
        SAME_CALLS,
        f"process {index} has yet to compile this with the others, and process {other} runs another program",
        PAD,
    )


def nobody_answers(index: int, coordinator: str, said: str, seconds: float) -> Problem:
    """What is wrong where a process does not reach process 0.

    Arguments:
      index: of the process.
      coordinator: "host:port" at which process 0 is sought.
      said: what the system says.
    """
    return Problem(
        "process",
        f"process {index}, joining process 0 at {coordinator}",
        f"{said}, for {seconds:.0f} s",
        "an address of process 0 that this host reaches",
        "all processes meet at process 0, which listens there once it has begun",
        "the name or address of its host, and a port that no firewall closes and nobody else has",
    )


def not_all_have_come(index: int, count: int, coordinator: str, seconds: float) -> Problem:
    """What is wrong where processes wait for others to join.

    Arguments:
      index: of the one that says it.
      count: of all that are to come.
    """
    return Problem(
        "process",
        f"process {index}, waiting at {coordinator} for all {count} processes",
        f"not all of them have joined in {seconds:.0f} s",
        "as many processes as were said, each with a number of its own",
        "no process begins before all have come",
        "what the others print, and whether they were started; processes= and index= in each",
    )
