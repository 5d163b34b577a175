"""A user's file on the command line: its functions, and their arguments and signatures."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sbp.errors import ArgumentError, Problem
from sbp.placement import Placement, for_placement

if TYPE_CHECKING:  # mistakes are printed before JAX is there
    import jax

    from sbp.compat.untyped import Leaf, Prefix, PyTree

TARGET = "FILE.py:FUNCTION"
EXAMPLE = "such as models/gpt.py:train_step of the repository"


def problem(where: str, got: str, legal: str, why: str, fix: str) -> ArgumentError:
    """The error for a mistake on the command line, or in the file that it names."""
    return ArgumentError(Problem("argument", where, got, legal, why, fix))


def split(target: str, what: str) -> tuple[Path, str]:
    """The FILE.py and the name in FILE.py:NAME."""
    file, _, name = target.rpartition(":")
    if not file or not name.isidentifier():
        raise problem(what, repr(target), f"{TARGET}", "the file and the name in it are needed", EXAMPLE)
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        why = "this is none" if path.exists() else "there is no such file from here"
        fix = EXAMPLE if path.exists() else f"a path from {Path.cwd().name}/"
        raise problem(what, repr(file), "a Python file, NAME.py", why, fix)
    return path, name


def load_file(file: Path) -> ModuleType:
    """Imports a file once, and lets it import its neighbours, as `python FILE.py` does."""
    path = file.resolve()
    name = f"_sbp_target_{hashlib.sha1(str(path).encode()).hexdigest()[:10]}"
    if name in sys.modules:
        return sys.modules[name]
    for folder in (os.getcwd(), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def value_named(target: str, what: str) -> Any:
    """The value of FILE.py:NAME."""
    file, name = split(target, what)
    module = load_file(file)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
        there = [n for n in own if callable(getattr(module, n)) and not n.startswith("_")]
        raise problem(
            what,
            f"{file.name} has no {name!r}",
            ", ".join(there) or "a name of the file",
            "the name must be at its top level",
            "check the spelling",
        )
    return getattr(module, name)


def value(x: Any) -> Any:
    """The value of FILE.py:NAME, or its result if it is a function."""
    return x() if callable(x) else x


def arguments(target: str, given: str | None) -> tuple[PyTree, ...]:
    """The arguments for the plan of a function.

    Arguments:
      given: their FILE.py:NAME; None for those beside the function in its file.

    Raises:
      ArgumentError: if there are none.
    """
    file, name = split(target, "the function")
    module, names = load_file(file), (f"{name}_args", "example_args")
    if given:
        found = value(value_named(given, "--args"))
    elif beside := next((n for n in names if hasattr(module, n)), None):
        found = value(getattr(module, beside))
    else:
        raise problem(
            target,
            f"no {names[0]} and no {names[1]} in {file.name}",
            "a tuple of arrays or jax.ShapeDtypeStructs, or a function that returns one",
            "a plan depends on the shapes of the arguments",
            f"in {file.name}:\n\n    def {names[0]}():\n"
            "        x = jax.ShapeDtypeStruct((32, 128), 'float32')\n"
            f"        return (x,)  # as in {name}(x)\n\n         or --args OTHER.py:NAME",
        )
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def signatures(target: str, given: str | None, placement: Placement) -> Prefix:
    """The in_sbp of a function: from FILE.py:NAME, from beside it in its file, or open."""
    from sbp.signature import AUTO

    if given:
        found = value_named(given, "--in-sbp")
    else:
        file, name = split(target, "the function")
        found = getattr(load_file(file), f"{name}_sbp", AUTO)
    return for_placement(found, placement)


def concrete(args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Random arrays in place of shapes: normal numbers, whole numbers below 2, or a key."""
    import jax
    import jax.numpy as jnp

    leaves, tree = jax.tree.flatten(args)
    keys = jax.random.split(jax.random.key(0), len(leaves) + 1)

    def array(x: Leaf, key: jax.Array) -> Leaf:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(key, x.shape) if x.shape else key
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.random.normal(key, x.shape, x.dtype)
        return jax.random.randint(key, x.shape, 0, 2).astype(x.dtype)

    return tuple(jax.tree.unflatten(tree, [array(x, k) for x, k in zip(leaves, keys, strict=False)]))
