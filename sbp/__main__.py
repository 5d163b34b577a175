"""The command line: `python -m sbp plan FILE.py:FUNCTION --placement h100:16x8 --out plan.html`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sbp import __version__
from sbp.errors import SbpError
from sbp.hardware_file import hardware_from
from sbp.passes.look.width import fitted, terminal_width
from sbp.placement import Placement, as_placement, parse_placement
from sbp.userfile import TARGET, arguments, loaded, named, problem, signatures, split, value

if TYPE_CHECKING:  # help and mistakes are printed before JAX is there
    import jax

    from sbp.runtime.execute import Program
    from sbp.untyped import Leaf, PyTree

HELP = """\
FUNCTION is a single-device JAX function at the top level of FILE.py. Its arguments are what FUNCTION_args()
or example_args() of the same file returns: a tuple of arrays or jax.ShapeDtypeStructs. FUNCTION_sbp, if it is
there, is its in_sbp, or a function from the placement to it; FUNCTION_placement is the placement, which a
function with stages (sbp.on) needs. No device of the placement's kind is needed, except to verify and to
profile.
"""
MEASURED = """\
Matrix products, memory, element-wise arithmetic, the launch of an op, and every collective over 2, 4, ... N
devices by size. It takes a minute or two; other programs on the machine disturb it.
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
    compiled = command(
        "compile",
        "compile a function, also for GPUs that are not here; compare it with its plan",
        _compile,
    )
    compiled.add_argument("target", metavar=TARGET)
    saved(compiled, ".html .json .txt, for GPUs also .trace.json of the simulated step")
    compiled.add_argument("--hlo", metavar="FILE", help="write XLA's program, optimised and scheduled")
    compiled.add_argument(
        "--topology",
        metavar="DxHxN",
        help="of the machine: NVLink domains, hosts in each, devices in each host, such as 16x1x8",
    )
    machine = command(
        "calibrate", "measure the devices of this machine, for --hardware", _calibrate, MEASURED
    )
    machine.add_argument("--out", metavar="FILE.toml", help="write the figures, for --hardware")
    machine.add_argument(
        "--devices", type=int, metavar="N", help="so many of them (default: all GPUs, or 8 CPU devices)"
    )
    for c in (plan, explain, verify, profile, compiled):
        c.add_argument(
            "--placement",
            metavar="KIND:AxB",
            help="such as cpu:2x4 or h100:16x8 (default: FUNCTION_placement of the file, else cpu:8)",
        )
        c.add_argument(
            "--hardware", metavar="FILE.toml", help="plan for this machine instead of the placement's kind"
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
        c.add_argument(
            "--donate", metavar="N,M", help="positions of arguments whose memory the results may take"
        )
        c.add_argument("--x64", action="store_true", help="with 64-bit types")
        c.add_argument("--time-limit", type=float, metavar="SECONDS", help="for the search")
        c.add_argument(
            "--memory-limit", metavar="SIZE", help="per device, such as 80GB: a plan over it is refused"
        )
    return top


def _program(options: argparse.Namespace) -> tuple[Program[..., PyTree], tuple[PyTree, ...]]:
    """The compiled function and its arguments."""
    from sbp.untyped import set_jax

    # The file may ask JAX for its devices, so its placement comes after those that the option needs.
    placement = parse_placement(options.placement) if options.placement else None
    runs = options.run in (_verify, _profile, _compile)
    if runs and placement is not None:
        _make_devices(placement)
    placement = placement or _placement(options)
    if runs:
        _make_devices(placement)
    if options.x64:
        set_jax("jax_enable_x64", True)
    from sbp.options import Options, PipelineOptions
    from sbp.runtime.execute import compile

    fn = named(options.target, "the function")
    if not callable(fn):
        raise problem(
            options.target, f"{type(fn).__name__}", "a function", "a program is made of a function", TARGET
        )
    given = Options(
        memory_limit=options.memory_limit,
        time_limit=options.time_limit,
        hardware=hardware_from(options.hardware) if options.hardware else None,
        pipeline=PipelineOptions(stages=options.stages, schedule=options.schedule),
        topology=_topology(options),
    )
    program = compile(
        fn,
        placement,
        in_sbp=signatures(options.target, options.in_sbp, placement),
        donate_argnums=_numbers(options.donate, ",", "--donate", "0,1") if options.donate else (),
        options=given,
    )
    return program, arguments(options.target, options.args)


def _numbers(text: str, between: str, where: str, example: str) -> tuple[int, ...]:
    """
    >>> _numbers("16x1x8", "x", "--topology", "16x1x8")
    (16, 1, 8)
    """
    try:
        return tuple(map(int, text.lower().split(between)))
    except ValueError:
        legal = f"whole numbers with {between!r} between them"
        raise problem(where, repr(text), legal, "it is a list of numbers", example) from None


def _topology(options: argparse.Namespace) -> tuple[int, ...] | None:
    text = getattr(options, "topology", None)
    return _numbers(text, "x", "--topology", "16x1x8") if text else None


def _placement(options: argparse.Namespace) -> Placement:
    """The placement that stands beside the function in its file, or the default."""
    file, name = split(options.target, "the function")
    given = f"{name}_placement"
    found = value(getattr(loaded(file), given, None))
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
            raise problem(
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


def _compile(options: argparse.Namespace) -> None:
    from sbp.passes.look.files import check_suffix, write
    from sbp.runtime.target.report_files import TRACE, WRITERS

    for path in options.out:
        check_suffix(path, [*WRITERS, *TRACE])
    program, args = _program(options)
    lowered = program.lower(*args)
    compiled = lowered.compile()
    if options.hlo:
        write(options.hlo, compiled.as_text() or "")
        _print(f"saved {options.hlo}")
    report = program.report_of(compiled, *args)
    _print(str(report))
    for path in options.out:
        report.save(path)
        _print(f"saved {path}")


def _calibrate(options: argparse.Namespace) -> None:
    from sbp.untyped import set_jax

    if options.devices is not None and options.devices < 1:
        legal, why = "a whole number of at least 1", "so many devices are measured"
        raise problem("--devices", str(options.devices), legal, why, "--devices 8")
    with suppress(RuntimeError):  # JAX runs already
        set_jax("jax_num_cpu_devices", options.devices or 8)
    import jax

    from sbp.runtime.calibrate import calibrate

    name = Path(options.out).stem if options.out else "this machine"
    with _progress() as said:
        found = calibrate(jax.devices()[: options.devices], name, said=said)
    _print(str(found))
    if options.out:
        found.save(options.out)
        _print(f"\nsaved {options.out}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, on a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


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
