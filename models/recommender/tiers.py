"""`--tiered`: tables of clicks larger than the devices, and than the host."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

import sbp
from models.recommender.batch import Batch
from models.recommender.feed import Data, Feed, no_batches
from models.recommender.learner import Learner, features
from models.recommender.stages import Flow
from sbp.options import bytes_of
from sbp.placement import Placement
from sbp.runtime.embedding import Collection, RowWise, Tiered, TierFeed
from sbp.runtime.embedding.tables import MOST_IDS
from sbp.runtime.embedding.tiers.budgets import rows_within, step_bytes
from sbp.text.units import bytes_text

PyTree: TypeAlias = Any


class TierClicks(TierFeed):
    """Clicks with slots in the place of keys.

    Arguments:
      tiered: the tables.
      clicks: with keys.
    """

    def __init__(self, tiered: Tiered, clicks: Feed[Flow]) -> None:
        names = [f.name for f in tiered.own.features]
        super().__init__(tiered, clicks, ids=lambda batch: _columns(batch, names), put=_with_slots)
        self.clicks = clicks

    @property
    def flow(self) -> str:
        """What training took its batches from, and what was moved, in words."""
        tiered = self.tiered
        rows, host = bytes_text(tiered.own.slot_bytes / tiered.shards), bytes_text(tiered.host_bytes)
        budgets = f"rows on a device take {rows}, the host's budget is {host}"
        return f"{self.clicks.flow}\n{self.total}\nmost at once: {tiered.memory}; {budgets}"


def _columns(batch: Batch, names: list[str]) -> dict[str, Any]:
    """The keys of each feature."""
    keys: Any = batch.keys if isinstance(batch.keys, tuple) else batch.keys.T
    return dict(zip(names, keys, strict=True))


def _with_slots(batch: Batch, slots: Mapping[str, Any]) -> Batch:
    """A batch with slots in the place of keys."""
    if isinstance(batch.keys, tuple):
        return replace(batch, keys=tuple(slots.values()))
    return replace(batch, keys=np.stack([*slots.values()], axis=1))


@dataclass(frozen=True)
class Tiers:
    """The tables of a run in tiers.

    Arguments:
      tables: the tables.
      whole: makes the same as a collection, for whoever has the memory.
    """

    tables: Tiered
    whole: Callable[[], Collection]

    def feed(self, clicks: Callable[[int], Flow]) -> TierClicks:
        """The batches of a training.

        Arguments:
          clicks: number of batches -> the flow of those behind them, with keys.
        """
        return TierClicks(self.tables, Feed(clicks))

    def score(
        self, clicks: Flow, scorer: Callable[[PyTree, Batch], jax.Array], state: PyTree
    ) -> Iterator[tuple[Batch, jax.Array]]:
        """Batches and their scores; rows come for them as they do in a training."""
        feed = self.feed(lambda _: clicks)
        with feed.batches_from(0) as batches:
            for step, batch in enumerate(batches, 1):
                state = feed.state_for(step, state)
                yield batch, scorer(state[0], batch)

    def rows(self, state: PyTree) -> dict[str, np.ndarray[Any, Any]]:
        """All rows of all tables, by table."""
        tables = {f.table.name: f.table for f in self.tables.own.features}
        every = {n: self.tables.read(state, n, np.arange(t.vocabulary_size)) for n, t in tables.items()}
        return {n: jax.tree.leaves(tree[0])[0] for n, tree in every.items()}

    def at_folder(self, folder: Path) -> Tiers:
        """The same tables without rows."""
        given = self.tables
        made = Tiered(
            given.own.features,
            given.optimizer,
            given.placement,
            device=given.device_bytes,
            host=given.host_bytes,
            ssd=folder,
            batches=given.batches,
        )
        return replace(self, tables=made)


def tiered_data(args: argparse.Namespace, data: Data) -> Data:
    """Clicks whose keys are ids of tiered tables: those of files as they are, unless `--rows` hashes them."""
    if args.vocabulary or args.table != "rows":
        raise ValueError("--tiered: keys need no --vocabulary, and tables lie by rows")
    if args.data and not args.rows:
        return replace(data, tiered=True, hashing=False, sizes=(MOST_IDS,) * len(data.sizes))
    return replace(data, tiered=True)


def tiers_of(
    args: argparse.Namespace,
    data: Data,
    placement: Placement,
    learner: Callable[[Collection], Learner],
    say: Callable[..., None],
) -> Tiers:
    """The tables of the command line; their rows take what a step leaves of the devices' budget.

    Arguments:
      learner: tables -> what learns.

    Raises:
      EmbeddingError: if no pass fits.
    """
    own = features(data.sizes, args.width, RowWise(), data.hotness)
    optimizer = sbp.rows(learner(Collection(own[:1])).table_optimizer)
    folder = Path(args.ssd or Path(args.out) / "rows")

    def made(device: float) -> Tiered:
        """The tables, with a budget of their rows."""
        return Tiered(
            own,
            optimizer,
            placement,
            device=device,
            host=args.host_budget,
            ssd=folder,
            batches=args.pass_batches,
        )

    batch = data.first_batch(args.batch)

    def needed(device: float) -> float:
        """What a step takes of a device."""
        tiered = made(device)
        of = learner(tiered.tables)
        params = jax.eval_shape(of.init, jax.random.key(0))
        args_of = (
            params,
            jax.eval_shape(of.init_state, params),
            TierClicks(tiered, Feed(no_batches)).example(batch),
        )
        step = sbp.compile(of.step, placement, in_sbp=of.in_sbp(placement), donate_argnums=(0, 1))
        return float(step_bytes(step.lower(*args_of).compile()))

    limit = float(bytes_of(args.device_budget, "--device-budget") or 0)
    distinct = sum(np.unique(x).size for x in jax.tree.leaves(_columns(batch, [f.name for f in own])))
    width = made(limit).own.passes[0].width
    rows = rows_within(limit, 1.5 * distinct * width / placement.size, needed)
    tiered = made(rows)
    say(
        f"rows on devices: {sum(p.slots for p in tiered.own.passes):,} of {sum(data.sizes):,}, "
        f"{bytes_text(tiered.own.slot_bytes / tiered.shards)} of {bytes_text(limit)} on each\n"
    )
    return Tiers(tiered, lambda: Collection(own))
