"""The command of the recommender models: options, data, plan, training, evaluation, comparison."""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

import sbp
from models import train
from models.recommender import feed, logistic
from models.recommender.batch import Batch
from models.recommender.feed import Data
from models.recommender.layers import Inputs
from models.recommender.layout import CRITEO, PREPARED
from models.recommender.learner import (
    AUTO,
    OPTIMIZERS,
    Learner,
    Model,
    choose_layouts,
    collection_of,
)
from models.recommender.metrics import Clicks, Score, scores_table
from models.recommender.options import CHECKED, HASHED_ROWS, parser
from models.recommender.pace import SHOWN, Pace
from models.recommender.stages import Flow
from models.recommender.synthetic import CARDINALITIES, DENSE
from models.recommender.tiers import TierClicks, Tiers, tiered_data, tiers_of
from models.recommender.vocabularies import POLICIES, Learning, LearningFeed, Vocabularies
from sbp import B
from sbp.placement import Placement
from sbp.runtime.embedding import Collection
from sbp.runtime.training.metrics import Log

PyTree: TypeAlias = Any
Scored: TypeAlias = Callable[[Flow], Iterator[tuple[Batch, jax.Array]]]
"""Gives the batches of a flow, with the scores of each."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves.

    Arguments:
      params: of the model, on their devices.
      losses: of the steps of this run.
      plan: of the train step.
      scores: by the name of who predicted: the model, and what it is compared with; none where training was
        asked to end.
      difference: to the same run on one device, if there was one.
      first: the step behind which it began: that of a checkpoint, or 0.
    """

    params: PyTree
    losses: list[float]
    plan: sbp.Plan
    scores: dict[str, Score]
    difference: train.Difference | None
    first: int = 0


def example(
    model: Model,
) -> tuple[Callable[..., Any], Callable[[], tuple[PyTree, ...]], Callable[[Placement], PyTree]]:
    """What `python -m sbp plan` plans: the train step on synthetic clicks, its arguments, its signatures.

    The step is the same for all placements whose number of devices divides 256.
    """
    defaults = parser("", model).parse_args([])
    rule = OPTIMIZERS[defaults.optimizer]
    tables = collection_of(CARDINALITIES, defaults.width, defaults.table, 1)
    inputs = Inputs(DENSE, len(CARDINALITIES), defaults.width)
    learner = Learner(model, inputs, tables, rule.make(rule.lr), optax.adam(defaults.dense_lr))

    def train_step(params: PyTree, state: PyTree, batch: Batch) -> tuple[PyTree, PyTree, jax.Array]:
        return learner.step(params, state, batch)

    def arguments() -> tuple[PyTree, ...]:
        params = jax.eval_shape(learner.init, jax.eval_shape(jax.random.key, 0))
        n = defaults.batch
        dense, keys = np.zeros((n, DENSE), np.float32), np.zeros((n, len(CARDINALITIES)), np.int32)
        batch = jax.eval_shape(lambda batch: batch, Batch(np.zeros(n, np.float32), dense, keys))
        return params, jax.eval_shape(learner.init_state, params), batch

    return train_step, arguments, lambda placement: learner.in_sbp(placement)


def main(prog: str, model: Model, argv: Sequence[str] | None = None) -> Result:
    """Plans, trains, evaluates, and compares as the options say."""
    args = parser(prog, model).parse_args(argv)
    placement = train.prepare(args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    data = _data(args)
    inputs = Inputs(len(data.layout.dense), len(data.sizes), args.width)
    rule = OPTIMIZERS[args.optimizer]
    by_rows = rule.make(rule.lr if args.lr is None else args.lr)
    learning = partial(Learner, model, inputs, table_optimizer=by_rows, optimizer=optax.adam(args.dense_lr))
    tiers = None
    if args.tiered:
        tiers = tiers_of(args, data, placement, lambda tables: learning(tables=tables), train.speaker())
    learner = learning(tables=tiers.tables.tables if tiers else _tables(args, data, placement, by_rows))
    train.speaker()(
        f"{type(model).__name__}, {sum(data.sizes):,} rows in {len(data.sizes)} tables, on {data.name}\n"
        f"on {placement}, --table {args.table}, --optimizer {args.optimizer}\n"
    )
    known = None
    if args.vocabulary:
        known = Vocabularies(learner.tables, POLICIES[args.evict], args.admit, data.hotness)
    with tiers.tables if tiers else nullcontext():
        return Run(args, data, learner, placement, known, tiers).all(out)


def _tables(args: argparse.Namespace, data: Data, placement: Placement, by_rows: Any) -> Collection:
    """The tables of the command line; what was chosen is printed with its reasons."""
    if args.table != AUTO:
        return collection_of(data.sizes, args.width, args.table, placement.size, data.hotness)
    choice = choose_layouts(data.sizes, args.width, args.batch, placement, by_rows, data.hotness)
    train.speaker()(f"{choice}\n")
    return choice.collection()


def _data(args: argparse.Namespace) -> Data:
    """The clicks of the command line; with vocabularies, keys stay keys."""
    found = _clicks(args)
    if args.hotness:
        most = args.hotness * len(found.sizes) if len(args.hotness) == 1 else args.hotness
        found = replace(found, hotness=most)
    if args.tiered:
        return tiered_data(args, found)
    if not args.vocabulary:
        return found
    if args.baseline or args.rows:
        raise ValueError(
            "--vocabulary N: keys have no rows before training, which --baseline and --rows need"
        )
    return replace(found, sizes=(args.vocabulary,) * len(found.sizes), hashing=False, learned=True)


def _clicks(args: argparse.Namespace) -> Data:
    """The files of the command line, or synthetic ones."""
    if not args.data:
        samples = args.batch * args.steps if args.samples is None else args.samples
        return feed.make_data(samples, args.held_out, args.seed, args.rows, args.keys)
    layout = PREPARED if args.prepared else CRITEO
    sizes = (args.rows or HASHED_ROWS,) * len(layout.categorical)
    name = f"{len(args.data)} files" if len(args.data) > 1 else args.data[0]
    return Data(name, tuple(args.data), tuple(args.test), layout, sizes, hashing=True)


@dataclass(frozen=True)
class Run:
    """One run of the command; of several processes all do the same, and process 0 prints."""

    args: argparse.Namespace
    data: Data
    learner: Learner
    placement: Placement
    vocabularies: Vocabularies | None = None
    tiers: Tiers | None = None
    say: Callable[..., None] = field(default_factory=train.speaker)

    def all(self, out: Path) -> Result:
        """Plan, training, comparison, evaluation."""
        in_sbp = self.learner.in_sbp(self.placement)
        # What changes in vocabularies is the same on all devices.
        every = in_sbp if self.vocabularies is None else (*in_sbp, [B] * self.placement.ndim)
        asked = self.args
        exchange = sbp.options.ExchangeOptions(count_keys=asked.count_keys, prefetch=asked.prefetch)
        options = sbp.Options(exchange=exchange)
        step = sbp.compile(self._step, self.placement, in_sbp=every, donate_argnums=(0, 1), options=options)
        batch, start = self.data.first_batch(self.args.batch), self._start()
        first = (batch,) if self.vocabularies is None else self.vocabularies.empty().learn(batch)
        if self.tiers is not None:
            first = (self.tiers.feed(feed.no_batches).example(batch),)
        plan = step.plan(*start, *first)
        if jax.process_index() == 0:
            plan.save(str(out / "plan.html"))
        self.say(plan, end="\n\n")

        copy = feed.copy_to(step.in_shardings[2])
        runs = train.checkpoints(self.args, partial(sbp.Checkpoints, tables=self.learner.tables))
        saving = {
            "known": self.vocabularies,
            "checkpoint": runs,
            "save_every": self.args.save_every,
            "log": train.logs(self.args),
        }
        done = self.run_training(step, start, copy, str(self.placement), self.args.steps, **saving)
        self.say("\n".join(map(str, step.key_counts())) + "\n" if self.args.count_keys else "", end="")
        losses = [row["loss"] for row in done.history]
        result = Result(done.state[0], losses, plan, {}, None, done.step - len(losses))
        if not losses:
            self.say(f"no training: the checkpoint is of step {done.step}, and --steps {self.args.steps}\n")
        if not done.is_done:
            self.say("asked to end; --resume goes on")
            return result
        difference = self.compare(step, copy) if self.args.check else None

        scorer = sbp.compile(self.learner.scores, self.placement, in_sbp=(in_sbp[0], in_sbp[2]))
        copy = self._looked_up(copy, self.vocabularies)
        name = type(self.learner.model).__name__
        if self.tiers is None:
            placed, _ = scorer.place(done.state[0], copy(batch))
            scored = self._scored(partial(scorer, placed), copy)
        else:
            scored, copy = partial(self.tiers.score, scorer=scorer, state=done.state), feed.as_it_is
        scores = {name: self.evaluate(name, scored, copy, done.step)}
        if self.args.alone or (self.args.alone is None and not self.args.data and self.tiers is None):
            scores[f"{name} on one device"] = self.alone_scored(done.step)
        scores |= self.others(done.step)
        self.say(scores_table(scores, self.data.name))
        return replace(result, scores=scores, difference=difference)

    def _start(self) -> tuple[PyTree, PyTree]:
        """The first parameters and optimizer state; no device holds more than its share of the tables."""
        rows = None if self.tiers is None else self.tiers.tables.init
        return self.learner.start(jax.random.key(self.args.seed), self.placement, rows)

    @property
    def _whole(self) -> Learner:
        """The learner of one device that holds everything."""
        return self.learner if self.tiers is None else replace(self.learner, tables=self.tiers.whole())

    def _flow(
        self, sources: Sequence[feed.Source], cut: feed.Cut, copy: feed.Copy, name: str, skip: int
    ) -> Flow:
        workers = feed.Workers(self.args.parsers, self.args.copiers)
        return feed.flow(self.data, sources, self.args.batch, cut, copy, workers, name, skip)

    @property
    def _step(self) -> Callable[..., Any]:
        return self.learner.step if self.vocabularies is None else self.learner.reset_step

    def _looked_up(self, copy: feed.Copy, known: Vocabularies | None) -> feed.Copy:
        """The copy of a batch to evaluate on, with the rows of the keys that have some."""
        return copy if known is None else lambda batch: copy(known.rows(batch))

    def _feed(self, copy: feed.Copy, steps: int, known: Vocabularies | None) -> feed.Feed[Any] | TierClicks:
        """The batches of a training."""

        def begun(first: int, copy: feed.Copy = copy) -> Flow:
            """Those of the steps behind the first ones."""
            cut = feed.full(self.args.batch, steps - first)
            return self._flow(self.data.train, cut, copy, "train", first)

        if self.tiers is not None and copy is not feed.copy_batch:
            return self.tiers.feed(lambda n: begun(n, feed.as_it_is))
        if known is None:
            return feed.Feed(begun)
        return LearningFeed(
            lambda n: Learning(begun(n, lambda batch: batch), known, copy), vocabularies=known
        )

    def run_training(
        self,
        step: sbp.Program[..., Any],
        start: tuple[PyTree, PyTree],
        copy: feed.Copy,
        where: str,
        steps: int,
        *,
        known: Vocabularies | None = None,
        log: Sequence[Log] = (),
        **saving: Any,
    ) -> sbp.training.FitResult:
        """What `fit` has left; prints some losses, and the rates of the stages.

        Arguments:
          known: what gives rows to keys.
          saving: where, and how often, as of `fit`.
        """
        self.say(f"training on {where}")
        batches, pace = self._feed(copy, steps, known), Pace(self.say, -(-steps // SHOWN))
        done = sbp.fit(step, start, batches, steps=steps, log=[*log, pace], **saving)
        pace.end(batches.flow, self.args.batch)
        return done

    def alone_scored(self, steps: int) -> Score:
        """The score of the same model, trained by as many steps on one device."""
        learner, known = self._whole, self._empty()
        params, _ = self.run_alone(self._alone_start(), steps, known)
        copy = self._looked_up(feed.copy_batch, known)
        return self.evaluate(
            "one device", self._scored(partial(jax.jit(learner.scores), params), copy), copy, steps
        )

    def _alone_start(self) -> tuple[PyTree, PyTree]:
        """The first parameters and state of one device that holds everything."""
        params = jax.jit(self._whole.init)(jax.random.key(self.args.seed))
        return params, jax.jit(self._whole.init_state)(params)

    def _scored(self, scorer: Callable[[Batch], jax.Array], copy: feed.Copy) -> Scored:
        """What scores batches."""
        return partial(feed.score, scorer=scorer, first=copy(self.data.first_batch(self.args.batch)))

    def run_alone(
        self, start: tuple[PyTree, PyTree], steps: int, known: Vocabularies | None
    ) -> tuple[PyTree, list[float]]:
        """Parameters and losses of the first steps on one device, in a plain loop."""
        self.say("training on one device")
        learner = self._whole
        once = jax.jit(learner.step if known is None else learner.reset_step, donate_argnums=(0, 1))
        (params, state), losses, pace = start, list[float](), Pace(self.say, -(-steps // SHOWN))
        with self._feed(feed.copy_batch, steps, known).batches_from(0) as batches:
            for batch in batches:
                params, state, loss = once(params, state, *(batch if isinstance(batch, tuple) else (batch,)))
                losses.append(float(loss))
                pace({"step": len(losses), "loss": losses[-1]})
        pace.end(batches, self.args.batch)
        return params, losses

    def compare(self, step: sbp.Program[..., Any], copy: feed.Copy) -> train.Difference:
        """The first steps once more, distributed and on one device, and how far apart these two end.

        In 64 bits: Adam and Adagrad divide a gradient by its own size, and a ReLU has a corner, so the
        rounding of 32 bits grows within some tens of steps to differences that say nothing.
        """
        with tempfile.TemporaryDirectory() as folder:
            if self.tiers is None:
                return self._compared(step, copy)
            tiers = self.tiers.at_folder(Path(folder))
            with tiers.tables:
                return replace(self, tiers=tiers)._compared(step, copy)

    def _compared(self, step: sbp.Program[..., Any], copy: feed.Copy) -> train.Difference:
        steps, start = min(self.args.steps, CHECKED), sbp.to_host(self._start())
        first = start if self.tiers is None else self._alone_start()
        with jax.enable_x64(True):
            params, state = (jax.tree.map(_doubled, tree) for tree in start)
            where = f"{self.placement}, in 64 bits"
            done = self.run_training(step, (params, state), copy, where, steps, known=self._empty())
            losses = [row["loss"] for row in done.history]
            alone, expected = self.run_alone(jax.tree.map(_doubled, first), steps, self._empty())
            here, there = done.state[0], jax.device_get(alone)
            if self.tiers is not None:  # by table: stacks of slots are others than those of rows
                rows, whole = self.tiers.rows(done.state), self.tiers.whole()
                here = {"dense": here["dense"], "tables": rows}
                there = {"dense": there["dense"], "tables": jax.device_get(whole.unstack(there["tables"]))}
            difference = train.compare(sbp.to_host(here), losses, there, expected)
        self.say(f"largest difference to one device in {steps} steps of 64 bits: {difference}\n")
        return difference

    def _empty(self) -> Vocabularies | None:
        return None if self.vocabularies is None else self.vocabularies.empty()

    def evaluate(self, name: str, scored: Scored, copy: feed.Copy, trained: int) -> Score:
        """The score of what predicts, on held-out clicks.

        Arguments:
          scored: gives batches of a flow, with scores.
          trained: how many batches the training has taken.
        """
        sources, skip = (self.data.test, 0) if self.data.test else (self.data.train, trained)
        cut = feed.rest(self.args.batch, self.args.held_out)
        clicks = Clicks()
        batches = self._flow(sources, cut, copy, "evaluate", skip)
        for batch, found in scored(batches):
            label, logits = sbp.to_host((batch.label, found))
            real = label != feed.NOBODY
            clicks.add(label[real], logits[real])
        if not len(clicks):
            raise self.data.refusal("no clicks after the training", "some", "--test FILE, or fewer --steps")
        self.say(f"evaluation of {name}\n{batches}\n")
        return Score.of(clicks)

    def others(self, trained: int) -> dict[str, Score]:
        """What the model is compared with: a logistic regression, and whoever made the clicks."""
        found: dict[str, Score] = {}
        if self.args.baseline:
            sizes, name = self.data.sizes, "logistic regression"
            batches = self.data.batches(self.data.train, self.args.batch, trained)
            weights = logistic.fit(batches, sizes, len(self.data.layout.dense))
            scorer = jax.jit(partial(logistic.logits, weights, sizes=sizes))
            found[name] = self.evaluate(name, self._scored(scorer, feed.copy_batch), feed.copy_batch, trained)
        if self.data.teacher is not None:
            clicks = Clicks()
            for label, logits in feed.truth(self.data.teacher, self.args.held_out):
                clicks.add(label, logits)
            found["teacher, without noise"] = Score.of(clicks)
        return found


def _doubled(x: Any) -> Any:
    """A floating-point array in 64 bits; any other one as it is."""
    return np.asarray(x, np.float64) if np.issubdtype(x.dtype, np.floating) else x
