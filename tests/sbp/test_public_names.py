"""The names of `import sbp`: few, each found, and those that have gone say where they are."""

import importlib
import inspect
import subprocess
import sys

import jax
import pytest

import sbp

# Names that programs are written against.
CONTRACT = set(
    "S B P AUTO placement Placement annotate on compile Program Plan load_plan Collective verify "
    "register_rule Options save restore fit constrain InternalError microbatch rows embedding".split()
)


def test_there_are_at_most_thirty() -> None:
    assert len(sbp.__all__) == len({*sbp.__all__}) <= 30
    assert {*sbp.__all__} >= CONTRACT
    assert all(getattr(sbp, name) is not None for name in sbp.__all__)


@pytest.mark.parametrize("name", sbp._MOVED)
def test_a_name_that_has_moved_says_where_it_is(name: str) -> None:
    new = sbp._MOVED[name]
    with pytest.raises(AttributeError, match=rf"module 'sbp' has no attribute '{name}'; it is {new}$"):
        getattr(sbp, name)
    first, *path = new.removeprefix("sbp.").split(".")
    found = getattr(sbp, first) if first in sbp._MODULES else importlib.import_module(new.rpartition(".")[0])
    assert getattr(found, path[-1]) is not None


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"module 'sbp' has no attribute 'nothing'$"):
        sbp.nothing  # noqa: B018


def test_processes_join_with_the_arguments_of_jax() -> None:
    ours = [*inspect.signature(sbp.initialize).parameters]
    theirs = [*inspect.signature(jax.distributed.initialize).parameters]
    assert ours[:4] == theirs[:4] and {*ours[:-1]} <= {*theirs} and ours[-1] == "more"


HEAVY = ("numba", "networkx", "scipy", "rich", "sbp.passes.chain", "sbp.passes.render", "sbp.rules")


def test_what_takes_long_to_load_waits_until_it_is_needed() -> None:
    """`sbp.compile` is found without it: its first call loads what plans, and a kernel's first call numba."""
    code = "import sys, sbp; sbp.compile, sbp.Options, sbp.S; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {*HEAVY} & {*found.stdout.split()}
