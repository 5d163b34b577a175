"""What a tensor could lie as instead, and what the whole plan would cost then: data and words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sbp.signature import NdSbp, format_sbp
from sbp.text.units import bytes_text, seconds_text


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What a plan costs, as the evaluator counts it.

    Arguments:
      seconds, step_seconds: of a step: one thing after the other, and with overlap.
      wire_bytes: what one device sends per step.
      memory_bytes: peak per device.
    """

    seconds: float
    step_seconds: float
    wire_bytes: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class SentAt:
    """What a plan sends of one kind, at one line, of tensors of one shape.

    Arguments:
      seconds: of all of it, per step.
    """

    kind: str
    source: str
    shape: tuple[int, ...]
    seconds: float

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """What is the same in two plans."""
        return self.kind, self.source, self.shape


@dataclass(frozen=True, slots=True)
class HeldPlan:
    """The plan of the whole program in which a tensor lies as said.

    Arguments:
      signature: of the tensor.
      figures: of that plan.
      made_by: the signatures of the ops that make the tensor then; "" for arguments.
      slack_seconds: by how much a plan may be faster that there was no time to find; 0.0 if none is.
      sent_at: what that plan sends; None where it was not asked for.
    """

    signature: NdSbp
    figures: PlanFigures
    made_by: str = ""
    slack_seconds: float = 0.0
    sent_at: tuple[SentAt, ...] | None = None


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor that is held to a signature, as a user writes it.

    Arguments:
      tensor: its name, with dtype and shape.
      how, where: as `TensorChoices.hold` has them.
      signature: what it is held to.
    """

    tensor: str
    how: str
    where: str
    signature: NdSbp


@dataclass(frozen=True, slots=True)
class Removal:
    """What to write so that a plan does without a collective.

    Arguments:
      holds: one tensor that is held, or two; () if nothing was found.
      figures: of the plan then; None if nothing was found.
      sent_at: what that plan sends.
      whole: whether the whole program was planned again with it, and the collective is gone from that plan;
        otherwise only what is near, the rest being as it was.
      remark: why nothing was found; "" if something was.
    """

    holds: tuple[HeldTensor, ...] = ()
    figures: PlanFigures | None = None
    sent_at: tuple[SentAt, ...] = ()
    whole: bool = False
    remark: str = ""


@dataclass(frozen=True, slots=True)
class RowChoices:
    """What else the tensors of a collective could lie as, and what to write to do without it.

    Arguments:
      tensors: those that it sends, and what leads to it.
      removal: None where it was not looked for.
    """

    tensors: tuple[TensorChoices, ...]
    removal: Removal | None = None


@dataclass(frozen=True, repr=False)
class TensorChoices:
    """The signature of a tensor, and the others that it could have.

    Arguments:
      tensor: its name.
      alike: how many tensors of this name are held together.
      made_by: the ops that make it, and under which signatures; "" for arguments.
      signatures: how it lies in the plan: at rest, or as it is made and then brought to.
      plan: what the plan costs.
      alternatives: the cheapest, each with the whole plan made again around it, the shortest step first.
      slower: how many others are at least as slow as each of these.
      unknown: how many there was no time for.
      impossible: how many no plan can have.
      limit_bytes: what a device may hold.
      where: in a program with stages, the stages and placements that it belongs to.
      hold: what to write to hold it: "in_sbp" or "out_sbp" with its path, "annotate" with the line of the op
        that makes it, "gradient" with what it is of; or "backward" with its line, where nothing can be
        written.
      near: whether only what is near the tensor was planned again, and the rest stayed as it is.
    """

    tensor: str
    alike: int
    made_by: str
    signatures: tuple[NdSbp, ...]
    plan: PlanFigures
    alternatives: tuple[HeldPlan, ...]
    slower: int
    unknown: int
    impossible: int
    limit_bytes: float
    where: str = ""
    hold: tuple[str, str] = ("", "")
    near: bool = False

    def __repr__(self) -> str:
        return f"<TensorChoices {self.tensor}: {len(self.alternatives)} of {self.count} alternatives>"

    @property
    def count(self) -> int:
        """How many signatures it could have instead."""
        return len(self.alternatives) + self.slower + self.unknown

    def __str__(self) -> str:
        together = f", {self.alike} alike, fixed together" if self.alike > 1 else ""
        lies = " -> ".join(map(format_sbp, self.signatures))
        of = [f"  {self.where}"] if self.where else []
        lines = [f"{self.tensor}{together}", *of, f"  signature {lies}"]
        if self.made_by:
            lines.append(f"  made by {self.made_by}")
        lines.append(f"  the plan: {_absolute(self.plan)}")
        if not self.alternatives:
            return "\n".join([*lines, "  no other signature is possible" if not self.count else self._rest()])
        lines += [
            "  with another signature, and everything else planned again:",
            *(f"    {row}" for row in _table(self)),
        ]
        if self.slower + self.unknown + self.impossible:
            lines.append(self._rest())
        return "\n".join(lines)

    def _rest(self) -> str:
        faster = "faster, counting only the ops of their own placements" if self.where else "faster"
        said = [
            f"{self.slower} more, none of them {faster} than these" if self.slower else "",
            f"{self.unknown} that there was no time for" if self.unknown else "",
            f"{self.impossible} that no plan can have" if self.impossible else "",
        ]
        return "    and " + ", ".join(filter(None, said))


def change(now: float, before: float, text: Callable[[float], str]) -> str:
    """A difference with its sign.

    >>> change(3.0, 1.0, bytes_text), change(1.0, 3.0, bytes_text), change(1.0, 1.0, bytes_text)
    ('+2 B', '-2 B', '+0 B')
    """
    difference = now - before
    if abs(difference) <= 1e-7 * max(abs(now), abs(before)):
        difference = 0.0
    return ("-" if difference < 0 else "+") + text(abs(difference))


def changes(now: PlanFigures, before: PlanFigures) -> tuple[str, str, str, str]:
    """What is different: in time, in time with overlap, in bytes that are sent, and at the peak."""
    return (
        change(now.seconds, before.seconds, seconds_text),
        change(now.step_seconds, before.step_seconds, seconds_text),
        change(now.wire_bytes, before.wire_bytes, bytes_text),
        change(now.memory_bytes, before.memory_bytes, bytes_text),
    )


def _absolute(f: PlanFigures) -> str:
    return (
        f"{seconds_text(f.seconds)}, {seconds_text(f.step_seconds)} with overlap, "
        f"{bytes_text(f.wire_bytes)} sent, {bytes_text(f.memory_bytes)} at the peak"
    )


def _table(choices: TensorChoices) -> list[str]:
    rows: list[Sequence[str]] = [("as", "time", "with overlap", "sent", "at the peak", "")]
    for held in choices.alternatives:
        too_large = held.figures.memory_bytes > choices.limit_bytes
        slack = f"at most {seconds_text(held.slack_seconds)} from the best" if held.slack_seconds else ""
        remarks = [held.made_by, "does not fit" if too_large else "", slack]
        remark = "; ".join(filter(None, remarks))
        rows.append((format_sbp(held.signature), *changes(held.figures, choices.plan), remark))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]).rstrip()
        for row in rows
    ]
