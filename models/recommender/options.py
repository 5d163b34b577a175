"""The options of the command of the recommender models."""

import argparse

from models import train
from models.recommender.learner import AUTO, LAYOUTS, OPTIMIZERS, Model
from models.recommender.vocabularies import POLICIES

HASHED_ROWS = 100_000
CHECKED = 50
"""How many steps are compared with one device, at most."""
CHECK = f"repeat the first {CHECKED} steps in 64 bits, distributed and on one device, and compare"


def parser(prog: str, model: Model) -> argparse.ArgumentParser:
    """The options that all recommender models have."""
    options = argparse.ArgumentParser(
        prog=f"python -m {prog}",
        description=f"Train {type(model).__name__} on Criteo's files or on synthetic clicks, distributed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = options.add_argument
    add("--data", nargs="+", default=[], metavar="FILE", help="Criteo TSV or Parquet; none: synthetic clicks")
    add("--test", nargs="+", default=[], metavar="FILE", help="evaluate on these, not on the rest of --data")
    add("--prepared", action="store_true", help="the dense columns of --data are scaled already")
    add("--rows", type=int, help=f"hash keys to as many rows a table; --data: {HASHED_ROWS:,}")
    add(
        "--samples",
        type=int,
        help="synthetic clicks to train on; default: what the steps take. Give it where "
        "a run is to go on with more steps: other numbers are other clicks",
    )
    add("--held-out", type=int, default=50_000, help="clicks to evaluate on, at most")
    add("--placement", default="cpu:8", help="KIND:AxBxC; CPU devices are made as needed")
    add("--table", choices=(*LAYOUTS, AUTO), default="rows", help="how tables lie; auto: each as is cheapest")
    add("--vocabulary", type=int, metavar="N", help="give keys rows as they appear, N in each table")
    add("--evict", choices=tuple(POLICIES), default="lru", help="which key of a full --vocabulary leaves")
    add("--admit", type=int, default=1, metavar="K", help="lookups before --vocabulary gives a key a row")
    add("--tiered", action="store_true", help="rows on a disk, the host and the devices, in passes")
    add("--device-budget", default="64MB", metavar="BYTES", help="of --tiered, on each device, for a step")
    add("--host-budget", default="512MB", metavar="BYTES", help="of --tiered, of each process")
    add("--ssd", metavar="DIR", help="where --tiered has its rows; default: OUT/rows")
    add("--pass-batches", type=int, default=64, metavar="N", help="batches of a pass of --tiered, at most")
    add("--keys", type=int, metavar="N", help="synthetic keys of all features, more than memory holds too")
    most = "the most keys of a feature in a click; for each, or one number for all: 1,1,8"
    add("--hotness", type=hotness, metavar="H", help=most)
    add("--width", type=int, default=16, help="of a row of a table")
    add("--optimizer", choices=tuple(OPTIMIZERS), default="adagrad", help="of the tables")
    add("--lr", type=float, help="learning rate of the tables; default: the optimizer's own")
    add("--dense-lr", type=float, default=2e-3, help="learning rate of all else, by Adam")
    add("--prefetch", action="store_true", help="send the keys of the next batch while a step computes")
    add("--count-keys", action="store_true", help="print the keys of all exchanges, and their rounds")
    add("--batch", type=int, default=1024, help="clicks per step, over all devices")
    add("--steps", type=int, default=200, help="of training, at most; every click is seen once")
    add("--seed", type=int, default=0)
    add("--parsers", type=int, default=1, help="threads that parse")
    add("--copiers", type=int, default=1, help="threads that hash keys and copy batches to the devices")
    add("--baseline", action="store_true", help="fit a logistic regression too")
    add("--check", action="store_true", help=CHECK)
    beside = "train on one device too, and report its score; default: on synthetic clicks"
    add("--alone", action=argparse.BooleanOptionalAction, help=beside)
    add("--out", default="out", metavar="DIR", help="where plan.html and metrics.csv go")
    train.add_long_run_options(options)
    return options


def hotness(text: str) -> tuple[int, ...]:
    """What `--hotness` says: a number for each feature, or one for all.

    >>> hotness("1,1,8"), hotness("4")
    ((1, 1, 8), (4,))
    """
    found = tuple(map(int, text.split(",")))
    if min(found) < 1:
        raise ValueError(text)
    return found
