"""What must be in a folder of checkpoints: its steps, what was set aside, and what a save does to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

ARRAYS, MANIFEST = "arrays", "manifest"
"""What of a step may have been harmed: files of its arrays, or its manifest."""


@dataclass(frozen=True)
class Version:
    """One save.

    Arguments:
      step: of the training.
      tag: in all its elements.
      harm: what was done to its files; "" for nothing.
    """

    step: int
    tag: int
    harm: str = ""


@dataclass(frozen=True)
class Content:
    """What a folder holds.

    Arguments:
      finished: the steps that exist, by number.
      abandoned: what was set aside, the first saved first; of those with a harmed manifest nothing is known.
    """

    finished: dict[int, Version] = field(default_factory=dict)
    abandoned: tuple[Version, ...] = ()

    @property
    def newest(self) -> list[Version]:
        """What `restore()` gives: the first of these that is as it was written."""
        return [self.finished[s] for s in sorted(self.finished, reverse=True)]

    @property
    def listed(self) -> tuple[Version, ...]:
        """What `Checkpoints.abandoned_steps` knows."""
        return tuple(v for v in self.abandoned if v.harm != MANIFEST)

    def saving(
        self, new: Version, head: int | None, keep: int, keep_every: int | None
    ) -> list[Content] | None:
        """What the folder holds before a save, and after each thing that it does; None if it is refused.

        Arguments:
          head: the step that training went on from; None for the beginning.
        """
        after = new.step + 1 if head is None else min(head, new.step) + 1
        if new.step in self.finished and new.step < after:
            return None
        found = [self]
        for step in sorted((s for s in self.finished if s >= after), reverse=True):
            found.append(found[-1].without(step, is_kept=True))
        found.append(found[-1].plus(new))
        for step in found[-1].prunable(keep, keep_every):
            found.append(found[-1].without(step))
        while len(found[-1].listed) > keep:
            first = found[-1].listed[0]
            rest = tuple(v for v in found[-1].abandoned if v != first)
            found.append(replace(found[-1], abandoned=rest))
        return found

    def plus(self, new: Version) -> Content:
        """With one step more."""
        return replace(self, finished={**self.finished, new.step: new})

    def without(self, step: int, is_kept: bool = False) -> Content:
        """Without a step, which may be set aside."""
        rest = {s: v for s, v in self.finished.items() if s != step}
        # tags are given in the order of saves
        aside = sorted((*self.abandoned, self.finished[step]), key=lambda v: v.tag)
        return Content(rest, tuple(aside) if is_kept else self.abandoned)

    def prunable(self, keep: int, keep_every: int | None) -> list[int]:
        """The steps that need not stay, the oldest first; those with a harmed manifest do not count."""
        counted, found = 0, list[int]()
        for step in sorted(self.finished, reverse=True):
            if counted >= keep and (keep_every is None or step % keep_every):
                found.append(step)
            elif counted < keep:
                counted += self.finished[step].harm != MANIFEST
        return found[::-1]

    def harmed(self, step: int, harm: str) -> Content:
        """With some harm to a step; the worst one counts."""
        old = self.finished[step]
        return self.plus(replace(old, harm=MANIFEST if MANIFEST in (harm, old.harm) else harm))
