"""The commands of `python -m sbp` and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

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

    def command(name: str, summary: str, epilog: str = HELP) -> argparse.ArgumentParser:
        c = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        c.set_defaults(run=run[name])
        return c

    def saved(c: argparse.ArgumentParser, suffixes: str) -> None:
        c.add_argument(
            "--out", action="append", default=[], metavar="FILE", help=f"save it: {suffixes}; repeatable"
        )

    def opened(c: argparse.ArgumentParser) -> None:
        c.add_argument(
            "--open", action="store_true", help="show the page in a browser, that of --out or one of its own"
        )

    plan = command("plan", "print the plan of a function: every collective with its cost and reason")
    plan.add_argument("target", metavar=TARGET)
    saved(plan, ".json .html .dot .svg, with stages also .trace.json; of a search the best one")
    opened(plan)
    plan.add_argument(
        "--order",
        choices=("time", "program"),
        default="time",
        help="of the collectives: the costliest first, or as they are executed",
    )
    plan.add_argument("--rows", type=int, metavar="N", help="of the table of collectives, at the most")
    plan.add_argument(
        "--search", type=int, metavar="N", help="plan for every hierarchy of N devices, and rank the plans"
    )
    plan.add_argument("--kind", help="of the devices of --search (default: h100)")
    plan.add_argument("--axes", type=int, help="of a hierarchy of --search, at the most (default: 3)")
    plan.add_argument(
        "--microbatches",
        metavar="N,M",
        help="numbers to try with --search; FUNCTION is then a function from the number to the function",
    )
    plan.add_argument(
        "--why",
        metavar="TENSOR",
        help="other signatures of a tensor, with everything else planned again: a path such as params['w'], "
        "a line, an op at a line",
    )
    plan.add_argument(
        "--what-if",
        metavar="TENSOR=SIGNATURE",
        help='plan with a tensor held to a signature, such as "x=[S(0), B]", and print what changes',
    )
    plan.add_argument(
        "--source",
        metavar="FILE.py",
        help="write the distributed program as Python: a shard_map with its collectives",
    )
    explain = command("explain", "say at length why collectives are there, with alternatives")
    explain.add_argument("target", metavar=f"{TARGET}|PLAN.json")
    explain.add_argument(
        "--at", metavar="TEXT", help="a line (gpt.py:150), a tensor, a kind; default: the slowest three"
    )
    diff = command("diff", "compare two saved plans", "PLAN.json is what `plan --out PLAN.json` wrote.")
    diff.add_argument("a", metavar="A.json")
    diff.add_argument("b", metavar="B.json")
    saved(diff, ".html, the graph with what was added, removed and changed")
    opened(diff)
    check = command(
        "check",
        "check a saved plan: its figures are computed again by independent code",
        "PLAN.json is what `plan --out PLAN.json` wrote; 1 is returned if anything in it is wrong.",
    )
    check.add_argument("plan", metavar="PLAN.json")
    verify = command("verify", "run a function on one device and distributed, and compare every result")
    verify.add_argument("target", metavar=TARGET)
    profile = command("profile", "run a function, and compare its times with its plan")
    profile.add_argument("target", metavar=TARGET)
    saved(profile, ".html, with stages also .svg .trace.json")
    compiled = command(
        "compile",
        "compile a function, also for GPUs that are not here; compare it with its plan",
    )
    compiled.add_argument("target", metavar=TARGET)
    saved(compiled, ".html .json .txt, for GPUs also .trace.json of the simulated step")
    compiled.add_argument("--hlo", metavar="FILE", help="write XLA's program, optimised and scheduled")
    compiled.add_argument(
        "--topology",
        metavar="DxHxN",
        help="of the machine: NVLink domains, hosts in each, devices in each host, such as 16x1x8",
    )
    machine = command("calibrate", "measure the devices of this machine, for --hardware", MEASURED)
    machine.add_argument("--out", metavar="FILE.toml", help="write the figures, for --hardware")
    machine.add_argument(
        "--devices", type=int, metavar="N", help="so many of them (default: all GPUs, or 8 CPU devices)"
    )
    launched = command(
        "launch", "run a script in several processes on this machine, again when one fails", LAUNCHED
    )
    launched.add_argument("--processes", type=int, default=2, metavar="N", help="so many (default: 2)")
    launched.add_argument(
        "--devices",
        type=int,
        default=0,
        metavar="N",
        help="CPU devices of each process (default: the devices that JAX finds)",
    )
    launched.add_argument("--port", type=int, default=0, help="where processes join (default: a free one)")
    launched.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all again when one fails, N times at most (default: 0); a script that saves goes on",
    )
    launched.add_argument(
        "--min-processes",
        type=int,
        metavar="M",
        help="if the same process fails twice in a row continue with one less, down to M (default: all)",
    )
    launched.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module, and its arguments")
    launched.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT.py", help="or a script, and its arguments"
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
        c.add_argument("--time-limit", type=float, metavar="SECONDS", help="after which planning is cut off")
        c.add_argument("--effort", type=float, default=1.0, help="how much is searched (default: 1)")
        c.add_argument("--no-cache", action="store_true", help="plan again, and keep no plan on disk")
        c.add_argument(
            "--plan", metavar="PLAN.json", help="take the signatures of this plan, and search for none"
        )
        c.add_argument(
            "--memory-limit",
            metavar="SIZE",
            help="per device, such as 80GB: the fastest plan found that fits; by default the memory of the "
            "device, and none for the fastest of any size",
        )
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
