"""What can be wrong with a run of `sbp.fit`, in words."""

from collections.abc import Sequence

from sbp.errors import Problem

MOST_SHOWN = 4


# -- arguments


def extra_form(given: object) -> Problem:
    """An `extra` that has no names."""
    legal, why = "a dict by names", "each part is found again by its name when a run goes on"
    return _argument("extra", f"a {type(given).__name__}", legal, why, 'extra={"key": key}')


def extra_name(name: str) -> Problem:
    """A name that `fit` uses itself."""
    why = "the loop keeps something of its own under it"
    return _argument("extra", f"the name {name!r}", "other names", why, name.partition(".")[2])


def feed_with_vocabulary(name: str) -> Problem:
    """A vocabulary in a feed that might read ahead."""
    got = f"batches_from of a feed that uses the vocabulary {name!r}"
    legal = "a feed with get_state and set_state, or a vocabulary that is named in extra"
    why = "a feed may read ahead: then its vocabulary knows keys of batches that the state has not seen"
    fix = "extra={'vocabulary': vocabulary} if a batch is made when it is asked for; a function of the step"
    return _argument("batches", got, legal, why, fix)


def no_way_back(kind: str) -> Problem:
    """Batches that are gone once they were taken."""
    legal = "a function of the step, a list, a feed, or an iterator with get_state and set_state"
    why = "going back to an older step takes the batches behind it once more"
    return _argument("batches", f"a {kind}, with max_rollbacks", legal, why, "lambda step: ...")


def nothing_to_go_back_to() -> Problem:
    """Going back without checkpoints."""
    why = "a run goes back to the last good step that was saved"
    fix = "checkpoint='runs/1'"
    return _argument("on_nonfinite", "max_rollbacks without checkpoint", "a folder to save in", why, fix)


def too_few(name: str, count: int) -> Problem:
    """A number of steps that is none."""
    return _argument(name, str(count), "1 or more", "it is a number of steps", f"{name}=1")


def _argument(name: str, got: str, legal: str, why: str, fix: str) -> Problem:
    return Problem("argument", f"sbp.fit(..., {name}=...)", got, legal, why, fix)


# -- while it runs


def metric_not_finite(at: int, bad: Sequence[str]) -> Problem:
    """A metric that is NaN or infinite."""
    return Problem(
        "nonfinite",
        f"step {at} of sbp.fit",
        "; ".join(bad),
        "finite metrics",
        "all steps after NaN are NaN",
        "Options(debug_nans=True) names the op that made it; a smaller learning rate; "
        "on_nonfinite=sbp.training.NonFinitePolicy(max_rollbacks=3) goes back to the last good step",
    )


def batch_awaited(at: int, seconds: float, is_saved: bool) -> Problem:
    """A feed that hangs."""
    kept = "the state is saved" if is_saved else "the last step that was saved is there"
    return Problem(
        "batch",
        f"the batch of step {at}",
        f"nothing after {seconds:.0f} s",
        "a batch, or the end of them",
        f"a feed that hangs would stop the run for good; {kept}",
        "batch_seconds=... if it may take longer; the feed, its files and its threads",
    )


def batch_is_late(at: int, seconds: float) -> str:
    """A warning: a batch that does not come."""
    return f"step {at} has waited {seconds:.0f} s for its batch"


def end_request(name: str) -> str:
    """A warning: somebody wants the end."""
    return f"{name}: the step that runs is finished and saved, and training ends; again: it ends at once"


def goes_back(what: str, at: int, times: int, most: int) -> str:
    """A warning: a state that is not good."""
    return f"{what}; back to step {at}, for the {times}. time of at most {most}"


def leaves_out(at: int) -> str:
    """A warning: a batch that makes the state bad."""
    return f"the batch of step {at} is left out: it has made the state bad twice"


def not_saved(at: int, error: object) -> str:
    """A warning: a step that could not be written."""
    return f"step {at} was not saved, and training goes on; the next one is tried: {error}"


# -- going on


def step_is_skipped(step: int, why: str) -> str:
    """A warning: a step that cannot be gone on from."""
    return f"step {step} is left out, an older one is taken: {why}"


def no_good_step(folder: object, wrong: Sequence[str]) -> Problem:
    """A folder of which no step is intact and good."""
    more = f"; and {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
    return Problem(
        "damaged",
        str(folder),
        "; ".join(wrong[:MOST_SHOWN]) + more,
        "a step that is intact and good",
        "a run does not start anew over existing steps",
        "another copy of the folder; or an empty folder, to start anew",
    )


def other_vocabularies(saved: int, used: int) -> Problem:
    """A step with another number of vocabularies than the batches use."""
    return Problem(
        "checkpoint",
        "sbp.fit(..., batches)",
        f"{used} vocabularies in the batches, {saved} in the step",
        "as many as were saved",
        "keys would be given other rows than they were trained in",
        "the batches that it was trained with",
    )


def extra_differs(names: Sequence[str]) -> Problem:
    """What is kept beside the state, and is not the same in all processes."""
    return Problem(
        "checkpoint",
        "sbp.fit(..., extra=...)",
        f"other values of {', '.join(names)} in another process",
        "the same in every process",
        "only process 0's value is kept, and a run may continue with another number of processes",
        "a function of the step, or a feed with batches_from, if each process reads its own data",
    )
