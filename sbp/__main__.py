"""The command line: `python -m sbp plan FILE.py:FUNCTION --placement h100:16x8 --out plan.html`."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbp import __version__
from sbp.commandline.commands import numbers, parse_held, parser
from sbp.commandline.user_file import (
    TARGET,
    arguments,
    concrete,
    load_file,
    problem,
    signatures,
    split,
    value,
    value_named,
)
from sbp.errors import SbpError
from sbp.hardware.file import hardware_from
from sbp.passes.render.terminal import fit_lines, print_fitted, terminal_width, writable
from sbp.placement import Placement, as_placement, parse_placement

if TYPE_CHECKING:  # help and mistakes are printed before JAX is there
    from sbp.compat.untyped import PyTree
    from sbp.options import Options
    from sbp.passes.face import Plan
    from sbp.runtime.program.program import Program


def _program(options: argparse.Namespace) -> tuple[Program[..., PyTree], tuple[PyTree, ...]]:
    """The compiled function and its arguments."""
    from sbp.compat.untyped import set_jax

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
    from sbp.runtime.program.compile import compile

    program = compile(
        _function(options),
        placement,
        in_sbp=signatures(options.target, options.in_sbp, placement),
        donate_argnums=_donated(options),
        options=_options(options),
    )
    return program, arguments(options.target, options.args)


def _function(options: argparse.Namespace) -> Callable[..., PyTree]:
    """The function that the command names."""
    fn = value_named(options.target, "the function")
    if not callable(fn):
        raise problem(
            options.target, f"{type(fn).__name__}", "a function", "a program is made of a function", TARGET
        )
    found: Callable[..., PyTree] = fn
    return found


def _options(options: argparse.Namespace) -> Options:
    """The options of a compilation."""
    from sbp.options import Options, PipelineOptions

    return Options(
        memory_limit=math.inf if options.memory_limit == "none" else options.memory_limit,
        time_limit=options.time_limit,
        effort=options.effort,
        hardware=hardware_from(options.hardware) if options.hardware else None,
        pipeline=PipelineOptions(stages=options.stages, schedule=options.schedule),
        topology=_topology(options),
        plan=options.plan,
        cache=not options.no_cache,
    )


def _donated(options: argparse.Namespace) -> tuple[int, ...]:
    return numbers(options.donate, ",", "--donate", "0,1") if options.donate else ()


def _topology(options: argparse.Namespace) -> tuple[int, ...] | None:
    text = getattr(options, "topology", None)
    return numbers(text, "x", "--topology", "16x1x8") if text else None


def _placement(options: argparse.Namespace) -> Placement:
    """The placement that stands beside the function in its file, or the default."""
    file, name = split(options.target, "the function")
    given = f"{name}_placement"
    found = value(getattr(load_file(file), given, None))
    return parse_placement("cpu:8") if found is None else as_placement(found, f"{given} of {file.name}")


def _make_devices(placement: Placement) -> None:
    """As many CPU devices as the placement has, if JAX has not been used yet."""
    from sbp.compat.untyped import set_jax

    if placement.platform == "cpu":
        try:
            set_jax("jax_num_cpu_devices", max(placement.ranks) + 1)
        except RuntimeError:
            return  # JAX runs already; a plan needs no devices, and `verify` says what is missing


def _plan(options: argparse.Namespace) -> None:
    from sbp.passes.render.files import TRACE, WRITERS, check_suffix

    for path in options.out:
        check_suffix(path, [*WRITERS, TRACE])
    plan = _one(options) if options.search is None else _search(options)
    if plan is not None:
        for path in _with_page(options, plan.name):
            _save(path, plan.save)
        if options.source is not None:
            _save(options.source, lambda path: plan.source().save(path))
        _open(options)


def _save(path: str, write: Callable[[str], None]) -> None:
    """Writes a file; a terminal says so while it takes long."""
    from sbp.runtime.compile.search_progress import search_line

    with search_line(f"writing {path}"):
        write(path)
    print_fitted(f"saved {path}")


def _with_page(options: argparse.Namespace, name: str) -> list[str]:
    """The files to be written: those that were asked for, and a page if one is to be shown."""
    if options.open and not any(path.lower().endswith(".html") for path in options.out):
        options.out.append(str(Path(tempfile.mkdtemp(prefix="sbp-")) / f"{name}.html"))
    out: list[str] = options.out
    return out


def _open(options: argparse.Namespace) -> None:
    """Shows the page in a browser."""
    if options.open:
        page = next(path for path in options.out if path.lower().endswith(".html"))
        webbrowser.open(Path(page).resolve().as_uri())


def _one(options: argparse.Namespace) -> Plan:
    """Prints the plan of one placement."""
    for name in ("kind", "axes", "microbatches"):
        if (given := getattr(options, name)) is not None:
            why = f"--{name} is a part of a search"
            raise problem(f"--{name}", str(given), "beside --search N", why, "--search 1024")
    program, args = _program(options)
    plan = program.plan(*args)
    if options.why is not None:
        print_fitted(str(plan.why(options.why)))
    if options.what_if is not None:
        other = plan.what_if(*parse_held(options.what_if))
        print_fitted(f"{other.notes[0]}\n\n{plan.diff(other)}")
        plan = other
    elif options.why is None:
        rows = {} if options.rows is None else {"rows": options.rows}
        print_fitted(plan.text(by_time=options.order == "time", **rows))
    return plan


def _search(options: argparse.Namespace) -> Plan | None:
    """Prints the plans of all hierarchies; the best one, if any can be used."""
    from sbp.compat.untyped import set_jax
    from sbp.runtime.search.search import search

    for name in ("why", "what_if"):
        if (asked := getattr(options, name)) is not None:
            flag = f"--{name.replace('_', '-')}"
            why = "a search has many plans, each with signatures of its own"
            raise problem(flag, f"{asked!r} beside --search", "with --placement", why, "--placement h100:2x4")
    if options.placement:
        why = "a search has all hierarchies of its devices"
        raise problem(
            "--placement", f"--placement beside --search {options.search}", "one of them", why, "--kind"
        )
    if options.x64:
        set_jax("jax_enable_x64", True)
    given: dict[str, Any] = {"kind": options.kind, "axes": options.axes}
    if options.microbatches:
        given["microbatches"] = numbers(options.microbatches, ",", "--microbatches", "8,16")
    if options.in_sbp:
        given["in_sbp"] = value_named(options.in_sbp, "--in-sbp")
    with _progress() as said:
        found = search(
            _function(options),
            options.search,
            donate_argnums=_donated(options),
            options=_options(options),
            said=said,
            **{k: x for k, x in given.items() if x is not None},
        )(*arguments(options.target, options.args))
    print_fitted(str(found))
    return found.best.plan if found.best else None


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
    print_fitted("\n\n".join(texts) or f"{plan.name} on {plan.placement}: no collectives")


def _diff(options: argparse.Namespace) -> None:
    from sbp.passes.face import load_plan
    from sbp.passes.render.diff import diff_text
    from sbp.passes.render.files import check_suffix, write
    from sbp.passes.render.web_page import diff_page

    for path in options.out:
        check_suffix(path, (".html",))
    a, b, names = load_plan(options.a), load_plan(options.b), (options.a, options.b)
    print_fitted(diff_text(a, b, names))
    for path in _with_page(options, "diff"):
        _save(path, lambda path: write(path, diff_page(a, b, names)))
    _open(options)


def _check(options: argparse.Namespace) -> int:
    from sbp.checker.report import check_file

    try:
        report = check_file(options.plan)
    except ValueError as e:
        legal, why = "JSON", "the file cannot be read as JSON"
        raise problem(options.plan, str(e), legal, why, "plan.save('plan.json') writes such a file") from None
    print_fitted(str(report))
    return 1 if report.complaints else 0


def _verify(options: argparse.Namespace) -> None:
    from sbp.runtime.diagnose.verify import verify

    program, args = _program(options)
    print_fitted(str(verify(program, *concrete(args))))


def _profile(options: argparse.Namespace) -> None:
    program, args = _program(options)
    profile = program.profile(*concrete(args))
    print_fitted(str(profile))
    for path in options.out:
        _save(path, profile.save)


def _compile(options: argparse.Namespace) -> None:
    from sbp.passes.render.files import check_suffix, write
    from sbp.runtime.report.report import SUFFIXES

    for path in options.out:
        check_suffix(path, SUFFIXES)
    program, args = _program(options)
    if options.hlo:
        compiled = program.lower(*args).compile()
        write(options.hlo, compiled.as_text() or "")
        print_fitted(f"saved {options.hlo}")
        report = program.report_of(compiled, *args)
    else:
        report = program.report(*args)
    print_fitted(str(report))
    for path in options.out:
        _save(path, report.save)


def _calibrate(options: argparse.Namespace) -> None:
    from sbp.compat.untyped import set_jax

    out, count = options.out and Path(options.out), options.devices
    if out and not out.parent.is_dir():  # said before a minute is spent
        raise problem("--out", str(out), "a file in a folder that is there", "the figures go there", "mkdir")
    with suppress(RuntimeError):  # JAX runs already
        set_jax("jax_num_cpu_devices", max(1, 8 if count is None else count))
    import jax

    from sbp.runtime.calibrate.measure import calibrate

    here = jax.devices()
    if count is not None and not 1 <= count <= len(here):
        legal = f"a whole number from 1 to {len(here)}"
        raise problem("--devices", str(count), legal, "so many devices are here", f"--devices {len(here)}")
    with _progress() as said:
        found = calibrate(here[:count], out.stem if out else "this machine", said=said)
    print_fitted(str(found))
    if out:
        found.save(out)
        print_fitted(f"\nsaved {out}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, on a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _launch(options: argparse.Namespace) -> int:
    from sbp.runtime.processes.launch import LaunchRequest, launch

    argv = ("-m", *options.module) if options.module else tuple(options.script)
    if not argv or options.processes < 1:
        legal, why = "at least one process, and a script or -m and a module", "it is run in each process"
        got = f"{options.processes} processes, {' '.join(argv) or 'nothing to run'}"
        raise problem("launch", got, legal, why, "launch --processes 2 -m models.gpt --steps 5")
    fewest = options.processes if options.min_processes is None else options.min_processes
    if options.restarts < 0 or not 1 <= fewest <= options.processes:
        got = f"--restarts {options.restarts}, --min-processes {fewest} of {options.processes}"
        legal = f"restarts from 0, processes from 1 to {options.processes}"
        why = "it is started again so often, with no fewer processes"
        raise problem("launch", got, legal, why, "launch --processes 4 --restarts 10 --min-processes 2 ...")
    what = LaunchRequest(argv, options.processes, options.devices, options.port, options.restarts, fewest)
    return launch(what, sys.stdout.write, sys.stderr.write)


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int | None]] = {
    "plan": _plan,
    "explain": _explain,
    "diff": _diff,
    "check": _check,
    "verify": _verify,
    "profile": _profile,
    "compile": _compile,
    "calibrate": _calibrate,
    "launch": _launch,
}


def _run(argv: Sequence[str] | None) -> int:
    try:
        options = parser(COMMANDS, __version__).parse_args(argv)
        code = options.run(options) or 0
    except BrokenPipeError:
        raise
    except (SbpError, OSError) as e:
        print(fit_lines(f"error: {e}", terminal_width(sys.stderr)), file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
    return int(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 is success, 1 a problem with the program (printed, no traceback), 2 wrong usage."""
    try:
        with writable(sys.stdout), writable(sys.stderr):
            return _run(argv)
    except BrokenPipeError:
        # Whoever read has seen enough, as `head` has; what Python writes when it ends goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
