"""The command line: `python -m sbp plan FILE.py:FUNCTION --placement h100:16x8 --out plan.html`."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from sbp import __version__
from sbp.errors import ArgumentError, Problem, SbpError
from sbp.passes.look.width import fitted, terminal_width
from sbp.placement import Placement, as_placement, parse_placement

if TYPE_CHECKING:  # help and mistakes are printed before JAX is there
    import jax

    from sbp.runtime.execute import Program
    from sbp.untyped import Leaf, Prefix, PyTree

TARGET = "FILE.py:FUNCTION"
EXAMPLE = "such as models/gpt.py:train_step of the repository"
HELP = """\
FUNCTION is a single-device JAX function at the top level of FILE.py. Its arguments are what FUNCTION_args()
or example_args() of the same file returns: a tuple of arrays or jax.ShapeDtypeStructs. FUNCTION_sbp, if it is
there, is its in_sbp, or a function from the placement to it; FUNCTION_placement is the placement, which a
function with stages (sbp.on) needs. No device of the placement's kind is needed, except to verify and to
profile.
"""


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m sbp", description="Plans single-device JAX functions for many devices."
    )
    top.add_argument("--version", action="version", version=f"sbp {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, summary: str, run: Callable[[argparse.Namespace], None], epilog: str = HELP
    ) -> argparse.ArgumentParser:
        c = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        c.set_defaults(run=run)
        return c

    def saved(c: argparse.ArgumentParser, suffixes: str) -> None:
        c.add_argument(
            "--out", action="append", default=[], metavar="FILE", help=f"save it: {suffixes}; repeatable"
        )

    plan = command("plan", "print the plan of a function: every collective, what it costs and why", _plan)
    plan.add_argument("target", metavar=TARGET)
    saved(plan, ".json .html .dot .svg, with stages also .trace.json")
    explain = command("explain", "say at length why collectives are there, with alternatives", _explain)
    explain.add_argument("target", metavar=f"{TARGET}|PLAN.json")
    explain.add_argument(
        "--at", metavar="TEXT", help="a line (gpt.py:150), a tensor, a kind; default: the slowest three"
    )
    diff = command(
        "diff", "compare two saved plans", _diff, "PLAN.json is what `plan --out PLAN.json` wrote."
    )
    diff.add_argument("a", metavar="A.json")
    diff.add_argument("b", metavar="B.json")
    verify = command(
        "verify", "run a function on one device and distributed, and compare every result", _verify
    )
    verify.add_argument("target", metavar=TARGET)
    profile = command("profile", "run a function, and compare what it takes with its plan", _profile)
    profile.add_argument("target", metavar=TARGET)
    saved(profile, ".html, with stages also .svg .trace.json")
    for c in (plan, explain, verify, profile):
        c.add_argument(
            "--placement",
            metavar="KIND:AxB",
            help="such as cpu:2x4 or h100:16x8 (default: FUNCTION_placement of the file, else cpu:8)",
        )
        c.add_argument("--stages", type=int, metavar="N", help="cut a function with micro-batches into N")
        c.add_argument(
            "--schedule", metavar="NAME", help="of the micro-batches of stages: 1f1b, zb-h1, auto, ..."
        )
        c.add_argument(
            "--args", metavar="FILE.py:NAME", help="the arguments, or a function that returns them"
        )
        c.add_argument(
            "--in-sbp",
            metavar="FILE.py:NAME",
            help="the signatures of the arguments, or placement -> signatures",
        )
        c.add_argument("--x64", action="store_true", help="with 64-bit types")
        c.add_argument("--time-limit", type=float, metavar="SECONDS", help="for the search")
        c.add_argument(
            "--memory-limit", metavar="SIZE", help="per device, such as 80GB: a plan over it is refused"
        )
    return top


def _problem(where: str, got: str, legal: str, why: str, fix: str) -> ArgumentError:
    return ArgumentError(Problem("argument", where, got, legal, why, fix))


def _split(target: str, what: str) -> tuple[Path, str]:
    """FILE.py and the name after the colon."""
    file, _, name = target.rpartition(":")
    if not file or not name.isidentifier():
        raise _problem(what, repr(target), f"{TARGET}", "the file and the name in it are needed", EXAMPLE)
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        why = "this is none" if path.exists() else "there is no such file from here"
        fix = EXAMPLE if path.exists() else f"a path from {Path.cwd().name}/"
        raise _problem(what, repr(file), "a Python file, NAME.py", why, fix)
    return path, name


def _module(file: Path) -> ModuleType:
    """Imports a file, as `python FILE.py` would find its neighbours; twice the same file is one module."""
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


def _named(target: str, what: str) -> Any:
    """What a FILE.py:NAME means."""
    file, name = _split(target, what)
    module = _module(file)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
        there = [n for n in own if callable(getattr(module, n)) and not n.startswith("_")]
        raise _problem(
            what,
            f"{file.name} has no {name!r}",
            ", ".join(there) or "a name of the file",
            "the name must be at its top level",
            "check the spelling",
        )
    return getattr(module, name)


def _value(x: Any) -> Any:
    return x() if callable(x) else x


def _arguments(options: argparse.Namespace) -> tuple[PyTree, ...]:
    """The arguments that the function is planned for."""
    file, name = _split(options.target, "the function")
    module, names = _module(file), (f"{name}_args", "example_args")
    if options.args:
        found = _value(_named(options.args, "--args"))
    elif given := next((n for n in names if hasattr(module, n)), None):
        found = _value(getattr(module, given))
    else:
        raise _problem(
            options.target,
            f"no {names[0]} and no {names[1]} in {file.name}",
            "a tuple of arrays or jax.ShapeDtypeStructs, or a function that returns one",
            "a plan depends on the shapes of the arguments",
            f"in {file.name}:\n\n    def {names[0]}():\n"
            "        x = jax.ShapeDtypeStruct((32, 128), 'float32')\n"
            f"        return (x,)  # as in {name}(x)\n\n         or --args OTHER.py:NAME",
        )
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _signatures(options: argparse.Namespace, placement: Placement) -> Prefix:
    """The in_sbp of the function: given, beside it in its file, or left open."""
    from sbp.signature import AUTO

    if options.in_sbp:
        found = _named(options.in_sbp, "--in-sbp")
    else:
        file, name = _split(options.target, "the function")
        found = getattr(_module(file), f"{name}_sbp", AUTO)
    return found(placement) if isinstance(found, FunctionType) else found


def _program(options: argparse.Namespace) -> tuple[Program[..., PyTree], tuple[PyTree, ...]]:
    """The compiled function and its arguments."""
    from sbp.untyped import set_jax

    # The file may ask JAX for its devices, so its placement comes after those that the option needs.
    placement = parse_placement(options.placement) if options.placement else None
    runs = options.run in (_verify, _profile)
    if runs and placement is not None:
        _make_devices(placement)
    placement = placement or _placement(options)
    if runs:
        _make_devices(placement)
    if options.x64:
        set_jax("jax_enable_x64", True)
    from sbp.options import Options, PipelineOptions
    from sbp.runtime.execute import compile

    fn = _named(options.target, "the function")
    if not callable(fn):
        raise _problem(
            options.target, f"{type(fn).__name__}", "a function", "a program is made of a function", TARGET
        )
    given = Options(
        memory_limit=options.memory_limit,
        time_limit=options.time_limit,
        pipeline=PipelineOptions(stages=options.stages, schedule=options.schedule),
    )
    return compile(fn, placement, in_sbp=_signatures(options, placement), options=given), _arguments(options)


def _placement(options: argparse.Namespace) -> Placement:
    """The placement that stands beside the function in its file, or the default."""
    file, name = _split(options.target, "the function")
    given = f"{name}_placement"
    found = _value(getattr(_module(file), given, None))
    return parse_placement("cpu:8") if found is None else as_placement(found, f"{given} of {file.name}")


def _make_devices(placement: Placement) -> None:
    """As many CPU devices as the placement has, if JAX has not been used yet."""
    from sbp.untyped import set_jax

    if placement.platform == "cpu":
        try:
            count = max(placement.ranks) + 1
            set_jax("jax_num_cpu_devices", count)
        except RuntimeError:
            return  # JAX runs already; a plan needs no devices, and `verify` says what is missing


def _plan(options: argparse.Namespace) -> None:
    from sbp.passes.look.files import TRACE, WRITERS, check_suffix

    for path in options.out:
        check_suffix(path, [*WRITERS, TRACE])
    program, args = _program(options)
    plan = program.plan(*args)
    _print(str(plan))
    for path in options.out:
        plan.save(path)
        _print(f"saved {path}")


def _explain(options: argparse.Namespace) -> None:
    from sbp.passes.explain.why import select, why_text
    from sbp.passes.face import load_plan

    if options.target.endswith(".json"):
        plan = load_plan(options.target)
    else:
        program, args = _program(options)
        plan = program.plan(*args)
    if options.at is None:
        seconds = [c.seconds for c in plan.collectives]
        found = sorted(range(len(seconds)), key=lambda i: -seconds[i])[:3]
    else:
        found = select(plan, options.at)
        if not found and plan.collectives:
            lines = ", ".join(dict.fromkeys(c.source for c in plan.collectives))
            raise _problem(
                "--at",
                repr(options.at),
                lines,
                "no collective has such a line, tensor or kind",
                "`plan` lists them all",
            )
    # Those of one placement together: what its ops could do instead is found once.
    parts = [plan.part(i) for i in found]
    plans = {id(part): part for part, _ in parts}
    texts = [why_text(p, [i for part, i in parts if part is p]) for p in plans.values()]
    _print("\n\n".join(texts) or f"{plan.name} on {plan.placement}: no collectives")


def _diff(options: argparse.Namespace) -> None:
    from sbp.passes.face import load_plan
    from sbp.passes.look.diff import diff_text

    _print(diff_text(load_plan(options.a), load_plan(options.b), (options.a, options.b)))


def _verify(options: argparse.Namespace) -> None:
    from sbp.runtime.verify import verify

    program, args = _program(options)
    _print(str(verify(program, *_concrete(args))))


def _profile(options: argparse.Namespace) -> None:
    program, args = _program(options)
    profile = program.profile(*_concrete(args))
    _print(str(profile))
    for path in options.out:
        profile.save(path)
        _print(f"saved {path}")


def _concrete(args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Random arrays where there are only shapes: normal, whole numbers below 2, or a key."""
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


def _print(text: str) -> None:
    """Prints what fits the terminal; what a reader must see first is red where there are colours."""
    from rich.console import Console
    from rich.text import Text

    shown = Text(fitted(text, terminal_width()))
    shown.highlight_regex(r"(?m)^DOES NOT FIT(?:.*\n {2,})*.*", "bold red")
    Console(file=sys.stdout, highlight=False).print(shown, soft_wrap=True)


@contextmanager
def _writable(stream: TextIO) -> Iterator[None]:
    """A stream whose encoding lacks a letter writes `?` for it instead of failing."""
    errors = stream.errors if isinstance(stream, io.TextIOWrapper) else None
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _run(argv: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(argv)
        options.run(options)
    except BrokenPipeError:
        raise
    except (SbpError, OSError) as e:
        print(fitted(f"error: {e}", terminal_width(sys.stderr)), file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 is success, 1 a problem with the program (printed, no traceback), 2 wrong usage."""
    try:
        with _writable(sys.stdout), _writable(sys.stderr):
            return _run(argv)
    except BrokenPipeError:
        # Whoever read has seen enough, as `head` has; what Python writes when it ends goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
