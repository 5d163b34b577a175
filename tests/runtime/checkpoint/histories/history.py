"""A random history of a folder of checkpoints: what is done to it, and what must be there after each thing.

The model (`model`) says what a save may leave. What is in the folder is looked at without the library
(`folder`), and read with it by a process of its own. Where a save was cut short, one of the things that it
may leave must be there, and is what must be there from then on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.runtime.checkpoint.histories.contents import LAYOUTS
from tests.runtime.checkpoint.histories.folder import FOREIGN_STEP, Disk, Foreign, look
from tests.runtime.checkpoint.histories.model import Content, Version
from tests.runtime.checkpoint.histories.processes import Process, Refused, Server

Operation = Callable[["History"], None]
WHOLE = ("rows", "columns", "copies", "host")
MOST_STEPS = 14
THERE, FOREIGN = "a step that is there already", "has not written"


@dataclass
class Saver:
    """A process that saves.

    Arguments:
      process: that is told to.
      keep, keep_every: which steps stay.
      head: the step that its training is at; None at the beginning.
    """

    process: Process
    keep: int
    keep_every: int | None
    head: int | None = None


@dataclass
class Plan:
    """Some saves in a row.

    Arguments:
      versions: that are saved.
      stages: per save what the folder may hold meanwhile.
      refusal: what the one after the last is refused with; "" where none is.
    """

    versions: list[Version]
    stages: list[list[Content]]
    refusal: str

    @property
    def last(self) -> Content:
        """What is there at the end."""
        return self.stages[-1][-1]


@dataclass
class History:
    """One history, from a seed.

    Arguments:
      server: starts its processes.
      folder: of the checkpoints.
      disk: that it is on, if it can be full.
      templates: finished checkpoints of others.
      planted: a fault of the library that its processes have.
    """

    seed: int
    server: Server
    folder: Path
    disk: Disk | None = None
    templates: Sequence[Path] = ()
    planted: str = ""
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng, self.readings = random.Random(self.seed), random.Random(self.seed)
        self.content = Content()
        self.tags = 0
        self.steps_of = dict[int, int]()
        self.may_be_read = set[int]()
        self.is_harmed = False
        self.may_be_empty = True
        self.foreign = Foreign(self.folder)
        self.owner: Saver | None = None
        self.beside: Process | None = None
        self.processes = list[Process]()
        self.folder.mkdir(parents=True)

    def run(self, operations: Mapping[Operation, int], count: int) -> None:
        """Does some things at random, and looks after each.

        Arguments:
          operations: what may be done, and how often.

        Raises:
          AssertionError: with the seed and all that was done, if something is not as it must be.
        """
        try:
            self._begin()
            for operation in self.rng.choices([*operations], [*operations.values()], k=count):
                operation(self)
                self.check()
            self._end()
        except Exception as e:
            done = "\n  ".join(self.said)
            raise AssertionError(f"seed {self.seed}: {type(e).__name__}: {e}\n  {done}") from e
        finally:
            for process in self.processes:
                process.kill()

    def say(self, text: str) -> None:
        """Notes what is done, for who must find out why."""
        self.said.append(text)

    # -- at the begin and at the end

    def _begin(self) -> None:
        names = (f"step_{FOREIGN_STEP:08d}/notes.txt", "step_1/notes", "step_00000003.orbax-checkpoint-tmp/x")
        for name in (*names, "step_notes/data-1/weights", "mine.txt", ".sbp_notes.tmp"):
            self.foreign.add(name, name)
        for template in self.templates:
            self.foreign.add(template.name, template)
        self.reader = self.process()
        self.reader.ask("open", folder=str(self.folder), keep=1, keep_every=None, job=None)
        if self.rng.random() < 0.34:
            self.beside = self.process()
            self.beside.ask("open", folder=str(self.folder), keep=1, keep_every=None, job=None)
            self.beside.ask("begin_reading", seed=self.seed)
            self.say("a reader beside")

    def _end(self) -> None:
        """Nothing is left that belongs to nobody, and training goes on."""
        if self.beside is not None:
            self._check_read(self.beside.ask("end_reading"))
        self.lose_owner()
        saver = self.saver()
        saver.process.ask("prepare")
        self.owner = saver
        left = self.foreign.leftovers(self.content)
        assert not left, f"left behind: {left}"
        self.go_back(saver, max((s for s, v in self.content.finished.items() if not v.harm), default=None))
        steps = [max(saver.head or 0, MOST_STEPS) + 1]
        plan = self.planned(saver, steps)
        self.begin_saving(saver, plan, steps)
        self.expect_saved(saver, plan, saver.process.end())
        self.check(most=len(self.content.finished))

    def _check_read(self, seen: Sequence[dict[str, Any]]) -> None:
        self.say(f"{len(seen)} times read beside")
        for answer in seen:
            assert "raw" not in answer, f"a reader beside has seen {answer['raw']}"
            if (words := answer.get("refused")) is not None:
                known = re.search(r"pruned while it was read|got +step \d+", words) is not None
                known |= self.may_be_empty and "no complete step" in words
                assert known or self.is_harmed, f"a reader beside was told: {words!r}"
            elif answer["value"] is not None:
                step, tag = answer["value"]
                assert tag in self.may_be_read, f"a reader beside has seen {tag}"
                assert step in (None, self.steps_of[tag]), f"as step {step} that of {self.steps_of[tag]}"

    # -- processes

    def process(self, **times: float) -> Process:
        """A new process."""
        started = self.server.started()
        self.processes.append(started)
        started.ask("times", **{"wait": 20.0, "dead": 10.0, **times})
        if self.planted:
            started.ask("plant", name=self.planted)
        return started

    def saver(self, **times: float) -> Saver:
        """A new process that saves, at the beginning of its training."""
        rng = self.rng
        keep, keep_every = rng.choice([1, 2, 3]), rng.choice([None, None, 4])
        made = Saver(self.process(**times), keep, keep_every)
        options = {"keep": keep, "keep_every": keep_every, "job": rng.choice([None, "a", "b"])}
        made.process.ask("open", folder=str(self.folder), **options)
        self.say(f"a new saver, process {made.process.pid}, {options}, {times}")
        return made

    def current(self) -> Saver:
        """The saver that owns the folder; a new one goes on from the newest step, or another, or none."""
        if self.owner is None:
            self.owner = self.saver()
            goes_on = self.rng.random() < 0.8
            self.go_back(self.owner, max(self.content.finished, default=None) if goes_on else None)
        return self.owner

    def lose_owner(self) -> None:
        """The saver ends, in good order, hung up, or killed."""
        if self.owner is not None:
            how = self.rng.choice(["close", "hang up", "kill"])
            if how == "close":
                self.owner.process.ask("close")
            (self.owner.process.kill if how == "kill" else self.owner.process.close)()
            self.say(f"{how} process {self.owner.process.pid}")
            self.owner = None

    # -- saves

    def planned(self, saver: Saver, steps: Sequence[int]) -> Plan:
        """Saves of some steps by a saver, as far as none of them is refused."""
        plan, content, head = Plan([], [[self.content]], ""), self.content, saver.head
        refused = look(self.folder).refused
        for step in steps:
            if step in refused:
                plan.refusal = FOREIGN
                break
            self.tags += 1
            new = Version(step, self.tags)
            stages = content.saving(new, head, saver.keep, saver.keep_every)
            if stages is None:
                plan.refusal = THERE
                break
            plan.versions.append(new)
            plan.stages.append(stages)
            self.steps_of[new.tag] = step
            self.may_be_empty |= any(not x.finished for x in stages)
            content, head = stages[-1], step
        self.tags += len(steps)
        self.may_be_read |= {v.tag for v in plan.versions}
        return plan

    def begin_saving(self, saver: Saver, plan: Plan, steps: Sequence[int], fault: Any = None) -> None:
        """Tells a process to save; a step that is refused has a tag of its own, too."""
        tags = [v.tag for v in plan.versions]
        tags += range(self.tags - len(steps) + len(tags) + 1, self.tags + 1)
        saver.process.begin("save", steps=steps, tags=tags, fault=fault)
        self.say(f"process {saver.process.pid} at {saver.head} saves {steps} as {tags}, fault {fault}")

    def expect_saved(self, saver: Saver, plan: Plan, answer: dict[str, Any], may_fail: bool = False) -> None:
        """What must be there after saves that came to an end.

        Arguments:
          may_fail: whether the disk has failed, so that a save may, as a whole, and what need not stay is
            perhaps not deleted.
        """
        done, error = answer["done"], answer["error"]
        self.say(f"  saved {done}: {error.splitlines()[1:2]}" if error else f"  saved {done}")
        if FOREIGN in error and done < len(plan.versions) and self.foreign.is_in(plan.versions[done].step):
            plan = Plan(
                plan.versions[:done], plan.stages[: done + 1], FOREIGN
            )  # the rest was swept or pruned
        if error and not may_fail:
            assert plan.refusal and plan.refusal in error, f"refused: {error}"
        if not error or not may_fail:
            assert done == len(plan.versions), f"{done} saved of {len(plan.versions)}"
            assert bool(error) == bool(plan.refusal), "it was not refused"
        possible = plan.stages[done][-1:]
        if may_fail and done:
            possible = [x for x in plan.stages[done] if plan.versions[done - 1].step in x.finished]
        self.adopt(possible)
        saver.head = plan.versions[done - 1].step if done else saver.head

    def adopt(self, possible: Sequence[Content]) -> None:
        """What the folder may hold, one of which it must."""
        found = look(self.folder)
        differ = [found.differs(x) for x in possible]
        assert "" in differ, (
            f"none of {len(possible)} that may be there: {'; or '.join(dict.fromkeys(differ))}"
        )
        self.content = possible[differ.index("")]

    # -- restoring

    def go_back(self, saver: Saver, step: int | None) -> None:
        """A saver goes on from a step, if it is as it was written."""
        if step is not None and self.restored(saver.process, step, self.rng.choice(WHOLE)):
            saver.head = step
        self.say(f"process {saver.process.pid} is at {saver.head}")

    def restored(self, process: Process, step: int | None, layout: str) -> bool:
        """Whether a step, or the newest that is not harmed, could be restored, and is what was saved."""
        strict = self.readings.random() < 0.3
        versions = self.content.newest if step is None else [self.content.finished[step]]
        try:
            found = process.ask("restore", step=step, layout=layout, strict=strict)
        except Refused as e:
            assert versions or "no complete step" in str(e), str(e)
            for version in versions[:1] if strict else versions:
                assert version.harm, f"step {version.step} is as it was written, but: {e}"
            return False
        assert versions, f"restored {found} where nothing is"
        for version in versions:  # what was harmed may not be read, or was not needed
            if found == version.tag:
                return True
            assert version.harm and not strict, f"step {version.step} in {layout} is of save {found}"
        raise AssertionError(f"save {found} in {layout}, which is no step's")

    def check(self, most: int = 1) -> None:
        """Looks at the folder, and restores what is newest and some more of what is there."""
        self.adopt([self.content])
        changed = self.foreign.changed()
        assert not changed, f"changed were {changed}"
        aside = [v.step for v in self.content.listed]
        wanted, listed = [sorted(self.content.finished), aside], self.reader.ask("listed")
        assert listed == wanted, f"steps and abandoned are {listed}, not {wanted}"
        there = [*self.content.finished]
        chosen = self.rng.sample(there, min(most, len(there)))
        for step in (None, *chosen):
            self.restored(self.reader, step, self.rng.choice([*LAYOUTS]))
        for step in chosen:
            version = self.content.finished[step]
            try:
                found = self.reader.ask("extra", step=step)
                assert found == version.tag, f"beside step {step} is what belongs to {found}"
            except Refused as e:
                assert version.harm, str(e)
