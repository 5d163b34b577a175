"""What models with stages share: where the stages live, what lies in which, and the options of a command."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import sbp
from sbp.options import PipelineOptions
from sbp.passes.schedule.orders import GENERATORS
from sbp.placement import AXIS_NAMES, Placement

DEFAULT = "1f1b"
SCHEDULES = (*(name for name in GENERATORS if name != "forward"), "auto")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a model, and how its batch is cut; as it stands, one stage and a whole batch.

    Arguments:
      placements: where each stage lives, in the order of the model; none for a model that is not cut.
      microbatches: the parts of a batch, which run one after the other.
    """

    placements: tuple[Placement, ...] = ()
    microbatches: int = 1

    def stage(self, index: int) -> AbstractContextManager[None]:
        """The scope of a stage, by its number; without stages, none."""
        return sbp.on(self.placements[index]) if self.placements else nullcontext()

    def block(self, index: int, blocks: int) -> AbstractContextManager[None]:
        """The scope of one of a model's `blocks` equal blocks: stages have equally many, give or take one.

        Raises:
          ValueError: if there are fewer blocks than stages.
        """
        stages = len(self.placements)
        if blocks < stages:
            raise ValueError(
                f"{stages} stages of a model with {blocks} blocks: each stage has one, so at most {blocks}"
            )
        return self.stage(index * stages // blocks)

    def cut(self, fn: Callable[..., Any], batch_args: Sequence[int]) -> Callable[..., Any]:
        """A function of a batch, run on its micro-batches, its results averaged."""
        if self.microbatches == 1 and not self.placements:
            return fn
        return sbp.microbatch(fn, self.microbatches, batch_args=batch_args)

    def stage_shape(self, whole: Placement) -> tuple[int, ...]:
        """The hierarchy that signatures are of: that of a stage, or of the whole without stages."""
        return self.placements[0].shape if self.placements else whole.shape


WHOLE = Pipeline()


def add_options(options: argparse.ArgumentParser) -> None:
    """Adds what a command with stages asks."""
    group = options.add_argument_group(
        "pipeline",
        "The first axis of --placement has a group of devices per stage; the other axes split each stage "
        "as --parallel says: --stages 2 --placement cpu:2x2x2 is a pipeline of two stages, each data and "
        "tensor parallel.",
    )
    group.add_argument(
        "--stages",
        type=int,
        default=1,
        help="parts of the model, one after the other: as many as the first axis of --placement, or a "
        "multiple of it, which comes by every group several times (interleaved), or twice (zb-v, dualpipe-v)",
    )
    group.add_argument(
        "--microbatches",
        type=int,
        default=0,
        help="parts of a batch, each of which goes through the model by itself; 0: two for each group of "
        "devices, or a whole batch without stages. Without stages this is gradient accumulation",
    )
    group.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help="the order in which a group of devices works on micro-batches; auto: the fastest one found "
        f"for the estimated times (if not given, {DEFAULT})",
    )
    group.add_argument(
        "--threads",
        action=argparse.BooleanOptionalAction,
        help="drive each group of devices by a thread of its own (if not given, the first steps are timed "
        "both ways where that can help)",
    )


def pipeline_of(args: argparse.Namespace, placement: Placement) -> tuple[Pipeline, Placement, sbp.Options]:
    """What the options ask for: stages, the placement with a name for their axis, and how they are compiled.

    Raises:
      ValueError: for options that do not go together.
    """
    if args.stages < 1 or args.microbatches < 0:
        raise ValueError(f"--stages {args.stages} --microbatches {args.microbatches}: at least 1 and 0")
    if args.stages == 1:
        if args.schedule or args.threads:
            raise ValueError("--schedule and --threads are of a pipeline: give --stages 2 or more")
        return Pipeline(microbatches=max(args.microbatches, 1)), placement, sbp.Options()
    groups = placement.shape[0]
    if args.stages % groups:
        raise ValueError(
            f"--stages {args.stages} --placement {args.placement}: its first axis has {groups} groups of "
            f"devices, and each has equally many stages: --stages {groups} or a multiple, or --placement "
            f"{placement.kind}:{'x'.join(map(str, (args.stages, *placement.shape[1:])))}"
        )
    name = args.schedule or DEFAULT
    rest = AXIS_NAMES.get(placement.ndim - 1) or tuple(f"x{i}" for i in range(placement.ndim - 1))
    placement = replace(placement, axes=("stage", *(rest if placement.ndim > 1 else ())))
    parts = placement.split("stage")
    order = GENERATORS.get(name, GENERATORS[DEFAULT]).asks.map.example(groups, args.stages // groups)
    pipeline = Pipeline(tuple(parts[group] for group in order), args.microbatches or 2 * groups)
    return pipeline, placement, sbp.Options(pipeline=PipelineOptions(schedule=name, threads=args.threads))
