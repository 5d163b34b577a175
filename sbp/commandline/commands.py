"""The commands of `python -m sbp` and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sbp.commandline.user_file import TARGET, problem

if TYPE_CHECKING:
    from sbp.signature import NdSbp

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
LAUNCHED = """\
Each process joins the others (sbp.initialize) before the script runs. What process 0 prints is printed as it
is, what others print with their numbers. If one ends that should not have, the others are ended, and all are
started again or 1 is returned; the last line says which it was. SIGTERM, Ctrl-C and a terminal that is closed
ask all to save and to end; the second one ends them at once.
"""


def _option(*names: str, **how: Any) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    return names, how


def _saved(suffixes: str) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    said = f"save it: {suffixes}; repeatable"
    return _option("--out", action="append", default=[], metavar="FILE", help=said)


FUNCTION = _option("target", metavar=TARGET)
OPENED = _option(
    "--open", action="store_true", help="show the page in a browser, that of --out or one of its own"
)
PLANNED = (
    _option(
        "--placement",
        metavar="KIND:AxB",
        help="such as cpu:2x4 or h100:16x8 (default: FUNCTION_placement of the file, else cpu:8)",
    ),
    _option("--hardware", metavar="FILE.toml", help="plan for this machine instead of the placement's kind"),
    _option("--stages", type=int, metavar="N", help="cut a function with micro-batches into N"),
    _option("--schedule", metavar="NAME", help="of the micro-batches of stages: 1f1b, zb-h1, auto, ..."),
    _option("--args", metavar="FILE.py:NAME", help="the arguments, or a function that returns them"),
    _option(
        "--in-sbp",
        metavar="FILE.py:NAME",
        help="the signatures of the arguments, or placement -> signatures",
    ),
    _option("--donate", metavar="N,M", help="positions of arguments whose memory the results may take"),
    _option("--x64", action="store_true", help="with 64-bit types"),
    _option("--time-limit", type=float, metavar="SECONDS", help="after which planning is cut off"),
    _option("--effort", type=float, default=1.0, help="how much is searched (default: 1)"),
    _option("--no-cache", action="store_true", help="plan again, and keep no plan on disk"),
    _option("--plan", metavar="PLAN.json", help="take the signatures of this plan, and search for none"),
    _option(
        "--memory-limit",
        metavar="SIZE",
        help="per device, such as 80GB: the fastest plan found that fits; by default the memory of the "
        "device, and none for the fastest of any size",
    ),
)
"""Of all commands that plan a function."""


@dataclass(frozen=True)
class Command:
    """A command: what it does, its options, and what its help ends with."""

    summary: str
    options: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]
    epilog: str = HELP


COMMANDS: Mapping[str, Command] = {
    "plan": Command(
        "print the plan of a function: every collective with its cost and reason",
        (
            FUNCTION,
            _saved(".json .html .dot .svg, with stages also .trace.json; of a search the best one"),
            OPENED,
            _option(
                "--order",
                choices=("time", "program"),
                default="time",
                help="of the collectives: the costliest first, or as they are executed",
            ),
            _option("--rows", type=int, metavar="N", help="of the table of collectives, at the most"),
            _option(
                "--search",
                type=int,
                metavar="N",
                help="plan for every hierarchy of N devices, and rank the plans",
            ),
            _option("--kind", help="of the devices of --search (default: h100)"),
            _option("--axes", type=int, help="of a hierarchy of --search, at the most (default: 3)"),
            _option(
                "--microbatches",
                metavar="N,M",
                help="numbers to try with --search; FUNCTION is then a function from the number to the "
                "function",
            ),
            _option(
                "--why",
                metavar="TENSOR",
                help="other signatures of a tensor, with everything else planned again: a path such as "
                "params['w'], a line, an op at a line",
            ),
            _option(
                "--what-if",
                metavar="TENSOR=SIGNATURE",
                help='plan with a tensor held to a signature, such as "x=[S(0), B]", and print what changes',
            ),
            _option(
                "--source",
                metavar="FILE.py",
                help="write the distributed program as Python: a shard_map with its collectives",
            ),
            *PLANNED,
        ),
    ),
    "explain": Command(
        "say at length why collectives are there, with alternatives",
        (
            _option("target", metavar=f"{TARGET}|PLAN.json"),
            _option(
                "--at",
                metavar="TEXT",
                help="a line (gpt.py:150), a tensor, a kind; default: the slowest three",
            ),
            *PLANNED,
        ),
    ),
    "diff": Command(
        "compare two saved plans",
        (
            _option("a", metavar="A.json"),
            _option("b", metavar="B.json"),
            _saved(".html, the graph with what was added, removed and changed"),
            OPENED,
        ),
        "PLAN.json is what `plan --out PLAN.json` wrote.",
    ),
    "check": Command(
        "check a saved plan: its figures are computed again by independent code",
        (_option("plan", metavar="PLAN.json"),),
        "PLAN.json is what `plan --out PLAN.json` wrote; 1 is returned if anything in it is wrong.",
    ),
    "verify": Command(
        "run a function on one device and distributed, and compare every result", (FUNCTION, *PLANNED)
    ),
    "profile": Command(
        "run a function, and compare its times with its plan",
        (FUNCTION, _saved(".html, with stages also .svg .trace.json"), *PLANNED),
    ),
    "compile": Command(
        "compile a function, also for GPUs that are not here; compare it with its plan",
        (
            FUNCTION,
            _saved(".html .json .txt, for GPUs also .trace.json of the simulated step"),
            _option("--hlo", metavar="FILE", help="write XLA's program, optimised and scheduled"),
            _option(
                "--topology",
                metavar="DxHxN",
                help="of the machine: NVLink domains, hosts in each, devices in each host, such as 16x1x8",
            ),
            *PLANNED,
        ),
    ),
    "calibrate": Command(
        "measure the devices of this machine, for --hardware",
        (
            _option("--out", metavar="FILE.toml", help="write the figures, for --hardware"),
            _option(
                "--devices",
                type=int,
                metavar="N",
                help="so many of them (default: all GPUs, or 8 CPU devices)",
            ),
        ),
        MEASURED,
    ),
    "launch": Command(
        "run a script in several processes on this machine, again when one fails",
        (
            _option("--processes", type=int, default=2, metavar="N", help="so many (default: 2)"),
            _option(
                "--devices",
                type=int,
                default=0,
                metavar="N",
                help="CPU devices of each process (default: the devices that JAX finds)",
            ),
            _option("--port", type=int, default=0, help="where processes join (default: a free one)"),
            _option(
                "--restarts",
                type=int,
                default=0,
                metavar="N",
                help="start all again when one fails, N times at most (default: 0); a script that saves "
                "goes on",
            ),
            _option(
                "--min-processes",
                type=int,
                metavar="M",
                help="if the same process fails twice in a row continue with one less, down to M (default: "
                "all)",
            ),
            _option("-m", dest="module", nargs=argparse.REMAINDER, help="a module, and its arguments"),
            _option(
                "script",
                nargs=argparse.REMAINDER,
                metavar="SCRIPT.py",
                help="or a script, and its arguments",
            ),
        ),
        LAUNCHED,
    ),
}


def parser(
    run: Mapping[str, Callable[[argparse.Namespace], int | None]], version: str
) -> argparse.ArgumentParser:
    """The parser of `python -m sbp`.

    Arguments:
      run: the function of each command, which takes its options.
      version: the version of the library.
    """
    top = argparse.ArgumentParser(
        prog="python -m sbp", description="Plans single-device JAX functions for many devices."
    )
    top.add_argument("--version", action="version", version=f"sbp {version}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.set_defaults(run=run[name])
        for names, how in command.options:
            own.add_argument(*names, **how)
    return top


def numbers(text: str, between: str, where: str, example: str) -> tuple[int, ...]:
    """Whole numbers with a separator between them.

    Arguments:
      where, example: for the message.

    Raises:
      ArgumentError: for any other text.

    >>> numbers("16x1x8", "x", "--topology", "16x1x8")
    (16, 1, 8)
    """
    try:
        return tuple(map(int, text.lower().split(between)))
    except ValueError:
        legal = f"whole numbers with {between!r} between them"
        raise problem(where, repr(text), legal, "it is a list of numbers", example) from None


def parse_held(asked: str) -> tuple[str, NdSbp]:
    """The tensor and the signature in TENSOR=SIGNATURE.

    Raises:
      ArgumentError: for a text without both.
      SignatureError: for a signature that cannot be read.

    >>> parse_held("params['w'] = [S(0), B]")
    ("params['w']", (S(0), B))
    """
    from sbp.signature import parse_sbp

    tensor, sign, text = asked.rpartition("=")
    if not sign:
        legal, fix = "TENSOR=SIGNATURE", '--what-if "x=[S(0), B]"'
        raise problem("--what-if", repr(asked), legal, "it says which tensor, and which signature", fix)
    return tensor.strip(), parse_sbp(text)
