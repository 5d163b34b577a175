"""The same train step through `jax.jit` with NamedShardings and through sbp, compiled for absent H100s.

    python -m benchmarks.gpu_target [--rows gpt/data:8,llama-scan@8/fsdp:2x4,...] [--json FILE] [--hlo FOLDER]
    python -m benchmarks.gpu_target --show benchmarks/results/gpu_target.json
    python -m benchmarks.gpu_target --stale benchmarks/results/gpu_target.json [--rows ...] [--renew N]

XLA:GPU compiles both with its own options, as on a machine that has them (pip install -e '.[gpu-target]').
Nothing runs, and no array is made. A row is a model of benchmarks/large.py (`@` its layers), a parallelism
and a placement. Per row: wire bytes per device and step (of both compiled programs by one meter, and of the
plan), memory per device (XLA's buffer assignment, and the plan), how many instructions are collectives that
kernels may run beside, and how many are not, the step that a simulation of the compiled schedule takes, what
of it is spent in collectives alone, and the seconds from the Python function to the executable.

A second table has the rows of AUTO beside the best that was made by hand, of ours and of jit's: of the same
model on the same placement, and on as many devices in any hierarchy.

With `--stale`: the rows of a file that were compiled from another program than the one that is lowered now,
or of which it is not known; nothing is compiled, but with `--renew` so many of them, one after another, and
the file has them at once.

The peer of "auto" is data parallel (of DLRM, tables split by rows): jit has no AUTO. That of a Llama whose
weights are split by width is laid out as MaxText does (benchmarks/maxtext.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

import sbp
from benchmarks.cases import Case
from benchmarks.large import LARGE
from benchmarks.versus_jax import compiled, parse, peer_of
from sbp.rates.chips import CHIPS
from sbp.runtime.hlo.meter import each_collective, read_compiled, text_of
from sbp.runtime.hlo.parser import Module
from sbp.runtime.hlo.parser import parse as parse_hlo
from sbp.runtime.target.collective_sites import asynchronous_names
from sbp.runtime.target.devices import absent_mesh
from sbp.runtime.target.simulation import simulate

KIND = "h100"
GPTS = ("gpt@2", "gpt@12", "gpt-bf16@2", "gpt-bf16@12")
CHOICES = ("data:8", "tensor:8", "zero:8", "2d:2x4", "auto:8", "auto:2x4")
ROWS = (
    *(f"{model}/{choice}" for model in GPTS for choice in CHOICES),
    *(f"gpt-bf16@12/{choice}:16x8" for choice in ("data", "zero", "2d")),
    *(f"llama@8/{choice}" for choice in ("data:8", "tensor:8", "zero:8", "fsdp:2x4")),
    *(f"llama-scan@8/{choice}" for choice in ("data:8", "tensor:8", "zero:8", "fsdp:2x4", "fsdp:16x8")),
    *("resnet@50/data:8", "resnet@50/data:16x8", "dlrm/rows:8", "dlrm/rows:16x8"),
    *(f"{model}/{choice}:8" for model in ("flax", "equinox") for choice in ("data", "zero")),
    *("gpt-bf16@12/auto:16x8", "llama@8/auto:8", "llama@8/auto:2x4"),
    *(f"llama-scan@8/auto:{shape}" for shape in ("8", "2x4", "16x8")),
    *(f"{model}/auto:{shape}" for model in ("resnet@50", "dlrm") for shape in ("8", "16x8")),
    *("flax/auto:8", "equinox/auto:8"),
)
AUTO_PEERS = {"dlrm": "rows"}
"""What the peer of "auto" is where it is not "data"."""
AUTO_MUST = 1.02
"""The step of AUTO's program as a share of the best by hand, at most."""


@dataclass(frozen=True, slots=True)
class TargetProgram:
    """What XLA made of a step.

    Arguments:
      wire_bytes, memory_bytes: per device and step; at the peak.
      asynchronous, synchronous: instructions that are collectives beside which kernels may run, and not.
      step_seconds, exposed_seconds: simulated: a step, and what of it is collectives alone.
      mfu: the share of the simulated step that matrix products would take at peak rate.
      compile_seconds: from the Python function to the executable.
    """

    wire_bytes: float
    memory_bytes: float
    asynchronous: int
    synchronous: int
    step_seconds: float
    exposed_seconds: float
    mfu: float
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One row of the table.

    Arguments:
      plan_wire_bytes, plan_memory_bytes: what the planner said.
      unexplained: what a report lists.
      digest: of the program that was lowered, ours; "" where nobody kept it.
    """

    row: str
    jit: TargetProgram
    sbp: TargetProgram
    plan_wire_bytes: float
    plan_memory_bytes: float
    unexplained: tuple[str, ...] = ()
    digest: str = ""

    def ratio(self, field: str) -> float:
        """A figure of ours as a share of the peer's."""
        ours, theirs = getattr(self.sbp, field), getattr(self.jit, field)
        return ours / theirs if theirs else math.nan


def program_of(exe: Any, seconds: float) -> TargetProgram:
    """What an executable is, by its text and its buffers; `seconds` it took to make."""
    text, memory = text_of(exe), exe.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    asynchronous, synchronous = scheduled(parse_hlo(text))
    simulation = simulate(text, CHIPS[KIND])
    return TargetProgram(
        wire_bytes=read_compiled(exe).wire_bytes,
        memory_bytes=peak - memory.alias_size_in_bytes,
        asynchronous=asynchronous,
        synchronous=synchronous,
        step_seconds=simulation.seconds,
        exposed_seconds=simulation.exposed_seconds,
        mfu=simulation.mfu,
        compile_seconds=seconds,
    )


def scheduled(module: Module) -> tuple[int, int]:
    """How many collectives run beside kernels, and how many do not; each instruction counts once."""
    beside = asynchronous_names(module)
    found = [name in beside for name, _ in each_collective(module)]
    return sum(found), len(found) - sum(found)


NO_PEERS: Mapping[str, TargetProgram] = MappingProxyType({})


def on_gpu(peer: Any, args: Any) -> Any:
    """A jitted function lowered for devices that are not here; sbp's own `lower` sees to that itself."""
    return peer.trace(*args).lower(lowering_platforms=("cuda",))


def _data_parallel(row: str) -> list[str]:
    """The rows that have the peer of a row of AUTO: over all axes at once it is the same on one."""
    model, _, choice, shape = parse(row)
    if choice != "auto":
        return []
    by_hand, name = AUTO_PEERS.get(model, "data"), row.partition("/")[0]
    return [f"{name}/{by_hand}:{'x'.join(map(str, on))}" for on in (shape, (math.prod(shape),))]


def measure(row: str, folder: Path | None = None, peers: Mapping[str, TargetProgram] = NO_PEERS) -> TargetRow:
    """One row; the texts of both programs are left in `folder`.

    Arguments:
      peers: what was found of the peers of rows, which are not compiled again.
    """
    case, placement, program = program_for(row)
    args = case.shapes()
    peer, _ = peer_of(case, args, placement, absent_mesh(placement))
    same = next((r for r in (row, *_data_parallel(row)) if r in peers), None)
    found = [] if same is None else [peers[same]]
    ways = ("jit", lambda *args: on_gpu(peer, args)), ("sbp", program.lower)
    for name, lowered in ways[len(found) :]:
        jax.clear_caches()  # the first to trace would pay for what both share
        exe, seconds = compiled(lowered, args)
        if folder is not None:
            file = folder / f"{row.replace('/', '.').replace(':', '.')}.{name}.hlo"
            file.write_text(text_of(exe), encoding="utf-8")
        found.append(program_of(exe, seconds))
    report = program.report_of(exe, *args)  # of the last one, ours
    plan, digest = report.plan, digest_of(program.lower(*args))
    return TargetRow(row, *found, plan.wire_bytes, plan.memory_bytes, report.unexplained_differences, digest)


def program_for(row: str) -> tuple[Case, sbp.Placement, Any]:
    """The case of a row, where it runs, and its program by sbp."""
    model, layers, choice, shape = parse(row)
    placement, case = sbp.placement(KIND, shape=shape), LARGE[model](choice, shape, layers)
    # Without a limit on time a plan does not depend on how busy the machine is; what is measured is this
    # search, and none that was saved before.
    options = sbp.Options(cache=False)
    program = sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1), options=options)
    return case, placement, program


def digest_of(lowered: Any) -> str:
    """Of what XLA is handed, without the lines of the user's program."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]


def is_stale(row: TargetRow) -> bool:
    """Whether a row is of another program than it would be now, as far as that is known."""
    case, _, program = program_for(row.row)
    return row.digest != digest_of(program.lower(*case.shapes()))


def stale(file: Path, rows: Sequence[str], renew: int) -> None:
    """Prints which rows of a file are of another program, and compiles some of them again.

    Arguments:
      rows: to look at.
      renew: how many are compiled again; their peers are, if none is in the file.
    """
    saved = {m.row: m for m in read(file)}
    peers = {name: m.jit for name, m in saved.items()}
    for name in rows:
        if not is_stale(saved[name]):
            print(f"{name} is as it was", flush=True)
            continue
        known = "" if saved[name].digest else ", or of one unknown"
        print(f"{name} is of another program{known}", flush=True)
        if renew > 0:
            renew -= 1
            row = measure(name, peers=peers)
            print(table([row]).splitlines()[-1], flush=True)
            # The file may have been written meanwhile: rows are compiled for hours.
            write(file, list(({m.row: m for m in read(file)} | {name: row}).values()))


def write(file: Path, rows: Sequence[TargetRow]) -> None:
    """What `read` reads."""
    file.write_text(json.dumps([asdict(m) for m in rows], indent=1), encoding="utf-8")


HEAD = (
    "| | wire MB: jit | plan | sbp | memory GB: jit | plan | sbp | asynchronous + not: jit | sbp "
    "| step ms: jit | sbp | ratio | exposed ms: jit | sbp | compile s: jit | sbp |"
)


def table(rows: Sequence[TargetRow]) -> str:
    """The rows as Markdown."""
    lines = [HEAD, "|" + "---|" * 16]
    for m in rows:
        wire = (m.jit.wire_bytes, m.plan_wire_bytes, m.sbp.wire_bytes)
        memory = (m.jit.memory_bytes, m.plan_memory_bytes, m.sbp.memory_bytes)
        cells = (
            m.row,
            *(f"{x / 1e6:.1f}" for x in wire),
            *(f"{x / 1e9:.2f}" for x in memory),
            *(f"{p.asynchronous} + {p.synchronous}" for p in (m.jit, m.sbp)),
            *(f"{p.step_seconds * 1e3:.2f}" for p in (m.jit, m.sbp)),
            f"{m.ratio('step_seconds'):.2f}",
            *(f"{p.exposed_seconds * 1e3:.2f}" for p in (m.jit, m.sbp)),
            *(f"{p.compile_seconds:.0f}" for p in (m.jit, m.sbp)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BestByHand:
    """The shortest simulated step that signatures by hand gave, ours or jit's; `row` says which."""

    row: str
    step_seconds: float


def best_by_hand(row: TargetRow, rows: Sequence[TargetRow], any_hierarchy: bool) -> BestByHand:
    """What a row of AUTO is held against; its own peer, which is by hand, is among it.

    Arguments:
      any_hierarchy: whether other hierarchies of as many devices count too.
    """
    model, layers, _, shape = parse(row.row)
    found = [BestByHand(f"{row.row.partition('/')[0]} data parallel, jit", row.jit.step_seconds)]
    for other in rows:
        name, depth, choice, on = parse(other.row)
        fits = math.prod(on) == math.prod(shape) if any_hierarchy else on == shape
        if (name, depth) == (model, layers) and choice != "auto" and fits:
            found.append(BestByHand(f"{other.row}, sbp", other.sbp.step_seconds))
            found.append(BestByHand(f"{other.row}, jit", other.jit.step_seconds))
    return min(found, key=lambda x: x.step_seconds)


AUTO_HEAD = (
    f"| | step ms: AUTO | by hand, same placement | AUTO / by hand | as many devices | AUTO / by hand "
    f"| at most {AUTO_MUST} |"
)


def auto_table(rows: Sequence[TargetRow]) -> str:
    """The rows of AUTO beside the best by hand, as Markdown; some have a peer by hand alone."""
    lines = [AUTO_HEAD, "|" + "---|" * 7]
    for m in rows:
        if parse(m.row)[2] != "auto":
            continue
        bests = [best_by_hand(m, rows, any_hierarchy) for any_hierarchy in (False, True)]
        shown = [f"{m.sbp.step_seconds * 1e3:.2f}"]
        for best in bests:
            shown += [f"{best.step_seconds * 1e3:.2f} ({best.row})"]
            shown += [f"{m.sbp.step_seconds / best.step_seconds:.3f}"]
        kept = m.sbp.step_seconds <= AUTO_MUST * bests[0].step_seconds
        lines.append("| " + " | ".join([m.row, *shown, "met" if kept else "SHORT"]) + " |")
    return "\n".join(lines)


def summary(rows: Sequence[TargetRow]) -> str:
    """The means over all rows, what was lost, and where the plan is not what XLA made of it."""
    fields = {
        "wire bytes": "wire_bytes",
        "memory": "memory_bytes",
        "simulated step": "step_seconds",
        "compile time": "compile_seconds",
    }
    lines = []
    for name, field in fields.items():
        ratios = {m.row: r for m in rows if (r := m.ratio(field)) > 0}
        if ratios:
            lost = [f"{row} {r:.2f}" for row, r in ratios.items() if r > 1.01]
            mean = statistics.geometric_mean(ratios.values())
            lines.append(
                f"{name}: geometric mean {mean:.2f} of jit's; rows lost: {', '.join(lost) or 'none'}"
            )
    for name, limit, planned, made in (
        ("wire bytes", 0.01, "plan_wire_bytes", "wire_bytes"),
        ("memory", 0.10, "plan_memory_bytes", "memory_bytes"),
    ):
        apart = {m.row: getattr(m, planned) / max(getattr(m.sbp, made), 1.0) for m in rows}
        said = [f"{row} {r:.2f}" for row, r in apart.items() if abs(r - 1) > limit]
        lines.append(f"{name}, plan / compiled, off by more than {limit:.0%}: {', '.join(said) or 'none'}")
    unexplained = [f"{m.row}: {x}" for m in rows for x in m.unexplained]
    lines.append(f"collectives of plan or program that nothing explains: {'; '.join(unexplained) or 'none'}")
    return "\n".join(lines)


def read(file: Path) -> list[TargetRow]:
    """The rows that `--json` wrote."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    programs = ({name: TargetProgram(**row[name]) for name in ("jit", "sbp")} for row in rows)
    return [
        TargetRow(**row | made | {"unexplained": tuple(row.get("unexplained", ()))})
        for row, made in zip(rows, programs, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_target", description=__doc__.splitlines()[0])
    default = ",".join(ROWS)
    parser.add_argument(
        "--rows", default=default, help=f"model@layers/parallelism:placement, ... ({default})"
    )
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument(
        "--show", metavar="FILE", type=Path, nargs="+", help="compile nothing: the tables of such JSONs"
    )
    parser.add_argument("--hlo", metavar="FOLDER", type=Path, help="keep the compiled texts there")
    parser.add_argument(
        "--peers", metavar="FILE", type=Path, help="such a JSON: peers are not compiled, but taken from there"
    )
    parser.add_argument(
        "--stale", metavar="FILE", type=Path, help="which rows of such a JSON are of another program"
    )
    parser.add_argument("--renew", metavar="N", type=int, default=0, help="compile so many of these again")
    options = parser.parse_args(argv)
    if options.show is not None:
        saved = list({m.row: m for file in options.show for m in read(file)}.values())
        print(f"{table(saved)}\n\n{auto_table(saved)}\n\n{summary(saved)}")
        return
    jax.config.update("jax_platforms", "cpu")
    if options.stale is not None:
        saved = [m.row for m in read(options.stale)]
        stale(options.stale, saved if options.rows == default else options.rows.split(","), options.renew)
        return
    if options.hlo is not None:
        options.hlo.mkdir(parents=True, exist_ok=True)
    rows: list[TargetRow] = []
    peers = {} if options.peers is None else {r.row: r.jit for r in read(options.peers)}
    print("\n".join(table([]).splitlines()))
    for row in options.rows.split(","):
        rows.append(measure(row, options.hlo, peers))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if options.json:  # after every row: a row takes a minute, and all of them an hour
            write(options.json, rows)
    print(f"\njax {jax.__version__}, {CHIPS[KIND].description}\n\n{auto_table(rows)}\n\n{summary(rows)}")


if __name__ == "__main__":
    main()
