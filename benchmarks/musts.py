"""What planning must keep: each must, its target, and how it is measured. `benchmarks.planner` prints them.

Train steps have no signature that anybody gave; where nothing else is said the placement is of absent H100s.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import sbp
from benchmarks import cases, gpu_target, large, layouts, limits, nets, overlap
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.chain import PLACEMENT, Logical
from sbp.passes.explain.plan import PlanData
from sbp.runtime.compile.traced_call import request_of
from sbp.text.units import bytes_text

Make: TypeAlias = Callable[[str, Sequence[int], int], cases.Case]


@dataclass(frozen=True)
class Verdict:
    """What was measured, in words, and whether it keeps the must."""

    measured: str
    met: bool


@dataclass(frozen=True)
class Must:
    """Something that planning must keep.

    Arguments:
      name: what `--only` calls it.
      target: in words.
      run: measures it, in so many rounds where it is a time.
      is_large: whether that takes minutes.
    """

    name: str
    target: str
    run: Callable[[int], Verdict]
    is_large: bool = False


# Train steps planned from nothing: CPU seconds, memory of the process, and the gap.


@dataclass(frozen=True)
class PlanningCost:
    """What planning takes, or may take: CPU seconds, gigabytes of the process, and the gap of the plan."""

    seconds: float = math.inf
    gigabytes: float = math.inf
    gap: float = 0.0

    def within(self, most: PlanningCost) -> bool:
        """Whether nothing is more than it may be."""
        return self.seconds <= most.seconds and self.gigabytes <= most.gigabytes and self.gap <= most.gap

    def __str__(self) -> str:
        said = [f"{self.seconds:.3g} CPU s"] if math.isfinite(self.seconds) else []
        said += [f"{self.gigabytes:.3g} GB"] if math.isfinite(self.gigabytes) else []
        return ", ".join([*said, f"gap {self.gap:.2%}"])


def _wide(choice: str, shape: Sequence[int], layers: int) -> cases.Case:
    """A GPT of width 4,096 with one sequence of 2,048 a device."""
    config = replace(large.GPT, width=4096, heads=32, sequence=2048)
    return cases.gpt_case(choice, shape, layers, config, math.prod(shape))


def _again(choice: str, shape: Sequence[int], layers: int) -> cases.Case:
    """Layers of Llama 3.2 1B, one by one, each computed twice: grouped queries, rotary embeddings, SwiGLU."""
    config = replace(large.llama.PRESETS["1b"], layers=layers, sequence=2048, scan=False, remat=True)
    return large.llama_case(config, 4, choice, shape)


MODELS: Mapping[str, Make] = {**large.LARGE, **nets.NETS, "wide": _wide, "llama-remat": _again}
PLANNING = {
    "gpt/8x8/12": PlanningCost(3.0),
    "gpt/8x8/96": PlanningCost(20.0),
    "wide/8x8/12": PlanningCost(gap=0.001),
    "gpt/4x8x8/24": PlanningCost(60.0, gap=0.01),
    "gpt/4x8x8/96": PlanningCost(60.0, gap=0.01),
    "gpt/2x2x2x2/12": PlanningCost(60.0, 3.0, 0.01),
    "llama-remat/2x4/24": PlanningCost(20.0),
    "llama-remat/8x8/24": PlanningCost(20.0),
    "llama-scan/8x8/96": PlanningCost(20.0),
    "mixture/8x8/12": PlanningCost(20.0, gap=0.01),
    "translation/8x8/6": PlanningCost(20.0, gap=0.01),
    "resnet/8x8/50": PlanningCost(20.0, gap=0.01),
    "unet/8x8/4": PlanningCost(20.0, gap=0.01),
    "dlrm/8x8/1": PlanningCost(20.0, gap=0.01),
}
"""By model, placement and layers."""
SLOW = ("gpt/8x8/96", "gpt/4x8x8/24", "gpt/4x8x8/96", "gpt/2x2x2x2/12")


def traced(make: Make, shape: Sequence[int], layers: int) -> Logical:
    """What the first pass is given for a model of which nothing is annotated, without a limit on memory: what
    a limit takes beyond that is among the musts of its own."""
    case = make("auto", shape, layers)
    placement = sbp.placement("h100", shape=tuple(shape))
    options = sbp.Options(memory_limit=math.inf, cache=False)
    program = sbp.compile(case.step, placement, donate_argnums=(0, 1), options=options)
    traced_call = program.trace(*case.shapes())
    signatures = traced_call.signatures(program.in_sbp, program.out_sbp)
    request = request_of(traced_call, signatures, placement, program.options)
    return Logical(request, traced_call.traced, Boxings(Network(placement, request.hardware)))


def planning_cost(name: str) -> PlanningCost:
    """What planning a row such as those of `PLANNING` takes in this process; tracing does not count."""
    model, placement, layers = name.split("/")
    logical = traced(MODELS[model], tuple(map(int, placement.split("x"))), int(layers))
    began = time.process_time()
    plan: PlanData = PLACEMENT.run(logical)
    seconds = time.process_time() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return PlanningCost(seconds, most, plan.cheapest_gap)


def _planning(name: str, most: PlanningCost, rounds: int) -> Verdict:
    """The medians of some processes that plan a row each."""
    found = []
    for _ in range(rounds):
        command = [sys.executable, "-m", "benchmarks.planner", "--one", name]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        if ran.returncode:
            return Verdict(f"failed: {(ran.stderr.strip() or 'no word').splitlines()[-1]}", False)
        found.append(PlanningCost(**json.loads(ran.stdout.splitlines()[-1])))
    fields = ("seconds", "gigabytes", "gap")
    cost = PlanningCost(*(statistics.median(getattr(r, field) for r in found) for field in fields))
    return Verdict(str(cost), cost.within(most))


# Plans under a limit on memory.

EQUAL = 0.95
LIMIT_GAP = 0.02


def _brute(count: int, rounds: int) -> Verdict:
    """Small random programs, each beside all plans there are."""
    from tests.passes.physical.limits import outcomes

    kinds = Counter(found.kind for found in outcomes(count))
    share, wrong = kinds["equal"] / count, kinds["bound above the best"]
    said = f"{share:.1%} equal, {wrong} bounds above the best, of {count}"
    return Verdict(said, share >= EQUAL and not wrong)


def _limited(model: str, shape: Sequence[int], layers: int, rounds: int) -> Verdict:
    """The gap at half the peak of the fastest plan, or at 1.2 times the smallest peak if that is more."""
    case = limits.case_of(model, shape, layers, 1)
    fastest = limits.planned(case, shape, math.inf)
    assert not isinstance(fastest, str)
    smallest = limits.smallest_peak(case, shape, fastest)
    limit = max(0.5 * fastest.memory_bytes, 1.2 * (smallest or 0.0))
    plan = limits.planned(case, shape, limit)
    if isinstance(plan, str):
        return Verdict(f"none found under {bytes_text(limit)}", False)
    said = f"gap {plan.cheapest_gap:.2%} under {bytes_text(limit)} of {bytes_text(fastest.memory_bytes)}"
    return Verdict(said, plan.cheapest_gap <= LIMIT_GAP)


# AUTO beside what is written by hand.

SAME = 1.0005
"""Times whose ratio is printed as 1.000 are the same."""


def _by_hand(row: str, rounds: int) -> Verdict:
    """The step that AUTO's plan takes, beside those of all parallelisms by name; all estimated."""
    found = overlap.beside_hands(row)
    return Verdict(f"{found.ratio:.3f} of {found.best}", found.ratio <= SAME)


def _layouts(devices: int, rounds: int) -> Verdict:
    """Llama 3 70B: the step of AUTO beside those of published layouts; all estimated."""
    args, found = layouts.arguments(1024), dict[str, float]()
    for row in layouts.layouts(devices, args[2].shape[0]):
        made = layouts.planned(row, max(1, 4 * 128 // devices), args)
        if made.plan is not None:
            found[made.name] = made.plan.step_seconds
    auto = min((t for name, t in found.items() if name.startswith("AUTO")), default=math.inf)
    hands = {name: t for name, t in found.items() if not name.startswith("AUTO")}
    best = min(hands, key=lambda name: hands[name])
    return Verdict(f"{auto / hands[best]:.3f} of {best}", auto <= SAME * hands[best])


def _compiled(rounds: int) -> Verdict:
    """The same of compiled programs, simulated, as benchmarks.gpu_target has left them."""
    rows = [m for file in sorted(COMPILED.glob("gpu_target*.json")) for m in gpu_target.read(file)]
    ratios = {
        m.row: m.sbp.step_seconds / gpu_target.best_by_hand(m, rows, any_hierarchy=False).step_seconds
        for m in rows
        if "/auto:" in m.row
    }
    worst = max(ratios, key=lambda row: ratios[row])
    kept = sum(ratio <= gpu_target.AUTO_MUST for ratio in ratios.values())
    return Verdict(f"{kept} of {len(ratios)} rows; {worst} {ratios[worst]:.3f}", kept == len(ratios))


COMPILED = Path(__file__).parent / "results"
HANDS = ("gpt@2/auto:8", "gpt@2/auto:2x4", "gpt-bf16@2/auto:8", "gpt-bf16@2/auto:2x4", "llama@8/auto:8")
LIMITED = (
    *(("gpt", shape, layers) for shape in ((8,), (2, 4)) for layers in (4, 12)),
    ("gpt", (8, 8), 12),
    ("llama", (8,), 4),
    ("llama", (8,), 8),
)
QUICK = ("gpt/8/4", "gpt/2x4/4")
BY_HAND = "at most the best of data, tensor, ZeRO-1, ZeRO-3, sequence or 2-D"


def _musts() -> list[Must]:
    brute = f"no bound above the best of all plans, at least {EQUAL:.0%} equal to it"
    found = [Must(f"brute/{n}", brute, partial(_brute, n), is_large=n > 100) for n in (50, 500)]
    for name, most in PLANNING.items():
        found.append(Must(name, f"at most {most}", partial(_planning, name, most), name in SLOW))
    for model, shape, layers in LIMITED:
        key = f"{model}/{'x'.join(map(str, shape))}/{layers}"
        target = f"gap at most {LIMIT_GAP:.0%} at half the peak or 1.2 x the smallest"
        run = partial(_limited, model, shape, layers)
        found.append(Must(f"limit/{key}", target, run, key not in QUICK))
    for row in HANDS:
        found.append(Must(f"hand/{row}", BY_HAND, partial(_by_hand, row), not row.startswith("gpt@2")))
    for devices in (128, 1024):
        target = "at most the best of published layouts"
        found.append(Must(f"layouts/{devices}", target, partial(_layouts, devices), is_large=True))
    target = f"compiled, at most {gpu_target.AUTO_MUST} x the best by hand or jit's"
    return [*found, Must("compiled/auto", target, _compiled)]


MUSTS: Mapping[str, Must] = {must.name: must for must in _musts()}

ELSEWHERE = {
    "published": "python -m benchmarks.published STEPS.csv",
    "overlap": "python -m benchmarks.overlap --results benchmarks/results/gpu_target.json",
    "measured": "python -m benchmarks.measured --hardware MACHINE.toml",
    "iopddl": "python benchmarks/iopddl.py PROBLEM.json.gz ... --seconds 60",
    "limits": "python -m benchmarks.limits",
    "search": "python -m benchmarks.search --without all",
}
"""Tables of their own, which need data, a quiet machine, or a reader: by name, their command."""
