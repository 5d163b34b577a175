"""When each action of a schedule runs, given how long each takes."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sbp.errors import Problem, raise_all
from sbp.passes.schedule.actions import SENDS, Action, Schedule
from sbp.passes.schedule.dataflow import Dataflow, Edge, dataflow, makes, receive_of, value_of
from sbp.passes.schedule.spans import Span, Timeline
from sbp.passes.schedule.times import Times


def simulate(
    schedule: Schedule, times: Times, edges: Sequence[Edge] | None = None, *, blocking: bool = False
) -> Timeline:
    """Simulates a schedule: each rank runs its actions in order, each as early as possible.

    A transfer starts when its send is reached, or when the value is made if the schedule has no transfers.
    The sender continues at once. The receiver waits only when it needs the value. With `blocking`, a send and
    its receive wait for each other, and both ranks are busy during the transfer.

    Arguments:
      schedule: with or without transfers.
      times: how long each action takes, in seconds or any other unit; integers and fractions stay exact.
      edges: which stage feeds which; without them, each the next one.
      blocking: whether transfers block, as those of a library without queues do.

    Raises:
      ArgumentError: if the times do not fit the stages, or if the ranks get stuck; it names what each waits
        for.
    """
    times.check(schedule.stages)
    return simulate_flow(schedule, times, dataflow(schedule.rank_of, edges), blocking=blocking)


def simulate_flow(schedule: Schedule, times: Times, flow: Dataflow, *, blocking: bool = False) -> Timeline:
    """The same for edges in the form of a dataflow, which many simulations can share."""
    run = _Run(schedule, times, flow, blocking)
    run.go()
    if stuck := list(run.stuck()):
        raise_all([_stuck_problem(schedule, stuck, blocking)])
    return Timeline(schedule.name, tuple(tuple(spans) for spans in run.spans))


def _stuck_problem(schedule: Schedule, stuck: Sequence[tuple[int, Action, str]], blocking: bool) -> Problem:
    return Problem(
        "argument",
        f"schedule {schedule.name!r}",
        "; ".join(f"rank {rank} stuck at {action}, which waits for {what}" for rank, action, what in stuck),
        "orders in which each action comes after what it needs"
        + (", on both ranks of a transfer" * blocking),
        "no rank can go on",
        "`deadlock.find_deadlock` shows the circle; `communication.add_transfers` makes orders without one",
    )


@dataclass(slots=True)
class _Run:
    """One simulation: every rank with its clock and its place in its order."""

    schedule: Schedule
    times: Times
    flow: Dataflow
    blocking: bool
    steps: list[list[tuple[Action, ...]]] = field(init=False)
    has_transfers: bool = field(init=False)
    spans: list[list[Span]] = field(init=False)
    at: list[int] = field(init=False)
    clock: list[float] = field(init=False)
    done: dict[Action, float] = field(init=False, default_factory=dict)
    """What has been made, or has arrived (named by its receive), and when."""
    reached: dict[Action, float] = field(init=False, default_factory=dict)
    """Sends and receives that their rank has come to, and when."""
    waiting: dict[Action, list[int]] = field(init=False, default_factory=dict)
    """Something that is not done -> the ranks that wait for it."""

    def __post_init__(self) -> None:
        ranks = range(self.schedule.ranks)
        self.spans, self.at, self.clock = [[] for _ in ranks], [0 for _ in ranks], [0 for _ in ranks]
        self.steps = [list(self.schedule.steps(rank)) for rank in ranks]
        self.has_transfers = self.schedule.has_transfers

    def go(self) -> None:
        """Runs until no rank can go on."""
        awake = deque(range(self.schedule.ranks))
        while awake:
            rank = awake.popleft()
            while self.at[rank] < len(self.steps[rank]):
                woken = self._do(rank, self.steps[rank][self.at[rank]])
                if woken is None:
                    break
                self.at[rank] += 1
                awake.extend(woken)

    def _do(self, rank: int, step: tuple[Action, ...]) -> list[int] | None:
        """Does a step and says whom it wakes; None if something is missing."""
        start = self.clock[rank]
        for need, delay in self._needs(step):
            if need not in self.done:
                self.waiting.setdefault(need, []).append(rank)
                return None
            start = max(start, self.done[need] + delay)
        if not step[0].computes:
            return self._transfer(rank, step[0])
        end = start + self.times.of_step(step)
        self.clock[rank] = end
        self.spans[rank] += [Span(rank, a, start, end) for a in step]
        return [woken for a in step for made in makes(a) for woken in self._finish(made, end)]

    def _needs(self, step: tuple[Action, ...]) -> Iterator[tuple[Action, float]]:
        """What a step waits for, and how long that travels."""
        for a in step:
            if not a.computes:
                if a.kind in SENDS:
                    yield value_of(a), 0
                continue
            for need in self.flow.needs(a):
                if not self.flow.crosses(need, a):
                    yield need, 0
                elif self.has_transfers:
                    yield receive_of(need, a), 0
                else:
                    yield need, self.times.on_the_way(need.stage, a.stage)

    def _transfer(self, rank: int, a: Action) -> list[int] | None:
        """Comes to a send or a receive; the value travels once both ends allow it."""
        if a in self.done:
            return []
        self.reached.setdefault(a, self.clock[rank])
        send, receive = (a, a.other_end) if a.kind in SENDS else (a.other_end, a)
        if send not in self.reached or receive not in self.reached:
            return None if self.blocking else []
        start = max(self.reached[send], self.reached[receive]) if self.blocking else self.reached[send]
        end = start + self.times.on_the_way(send.stage, receive.stage)
        woken = []
        for one in (send, receive):
            owner = self.schedule.rank_of[one.stage]
            self.spans[owner].append(Span(owner, one, start, end))
            if self.blocking:
                self.clock[owner] = end
                woken.append(owner)
            woken += self._finish(one, end)
        return woken

    def _finish(self, made: Action, end: float) -> list[int]:
        self.done[made] = end
        return self.waiting.pop(made, [])

    def stuck(self) -> Iterator[tuple[int, Action, str]]:
        """(rank, where it stands, what it waits for) of every rank that is not through."""
        for rank, at in enumerate(self.at):
            if at == len(self.steps[rank]):
                continue
            step = self.steps[rank][at]
            need = next((need for need, _ in self._needs(step) if need not in self.done), None)
            missing = step[0].other_end if need is None else need
            yield rank, step[0], f"{missing} of rank {self.schedule.rank_of[missing.stage]}"
