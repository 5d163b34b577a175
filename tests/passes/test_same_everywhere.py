"""A plan is the same in every process and on every machine: nothing hangs on addresses, on how Python hashes
strings, or on the last bits of what processors and libraries of C compute differently."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sbp.passes.plan.prices import exponentials

ROOT = Path(__file__).resolve().parents[2]
DECIDING = (
    "passes/boxing",
    "passes/physical",
    "passes/pipeline",
    "passes/plan",
    "passes/schedule",
    "passes/search",
    "sbp/rules",
)
"""Folders whose numbers decide which plan is found; beside them `sbp/rates`, whose times are rounded."""
INEXACT = frozenset(
    """cbrt cos cosh dot einsum exp exp2 expm1 float_power inner linalg log log10 log1p log2 matmul normal pow
    power sin sinh standard_normal tan tanh tensordot vdot""".split()
)
"""Attributes of `np`, `math` and random generators whose last bits, or whose order of adding, differ: a BLAS
adds as the processor likes, and with several cores otherwise than with one."""
PLANNED = """
import jax
jax.config.update("jax_platforms", "cpu")
import sbp
from benchmarks import cases, nets

def planned(case, limit):
    options = sbp.Options(cache=False, progress=False, memory_limit=limit)
    plan = sbp.compile(case.step, sbp.placement("h100", shape=(2, 4)), options=options).plan(*case.shapes())
    print(repr((plan.seconds, plan.bound, plan.step_seconds, plan.memory_bytes)))
    print(plan)
    return plan.memory_bytes

planned(cases.resnet_case("auto", (2, 4), 18), None)
net = nets.NETS["state-space"]("auto", (2, 4), 2)
planned(net, 0.6 * planned(net, None))
"""
OTHER_MACHINE = {
    "PYTHONHASHSEED": "2",
    "OPENBLAS_CORETYPE": "Nehalem",
    "OPENBLAS_NUM_THREADS": "1",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "NUMBA_CPU_NAME": "x86-64",
    "NUMBA_CPU_FEATURES": "",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F,-AVX2_Usable,-FMA_Usable",
}
"""What makes NumPy, its BLAS, Numba and the library of C compute as on a processor of 2008."""


@pytest.mark.full
def test_a_plan_is_the_same_in_every_process_and_on_every_machine() -> None:
    """Batch norms have kernels that could be merged in several ways, which once hung on addresses. A tight
    limit shows a single last bit: plans hung on the order in which a BLAS adds."""

    def began(other: dict[str, str]) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **other}
        return subprocess.Popen([sys.executable, "-c", PLANNED], env=env, stdout=subprocess.PIPE, text=True)

    texts = [process.communicate()[0] for process in [began({"PYTHONHASHSEED": "1"}), began(OTHER_MACHINE)]]
    assert texts[0] == texts[1] and texts[0].count("collectives") >= 3


def inexact(tree: ast.AST) -> Iterator[str]:
    """What an expression or a call of a module would compute otherwise elsewhere."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.MatMult()):
                yield f"{node.lineno}: @"
            case ast.BinOp(left=left, op=ast.Pow()) if not isinstance(left, ast.Constant):
                yield f"{node.lineno}: **"
            case ast.Attribute(value=ast.Name(id="np" | "math") | ast.Attribute(attr="random"), attr=name):
                if name in INEXACT:
                    yield f"{node.lineno}: {name}"
            case ast.Call(func=ast.Attribute(attr="argsort" | "argpartition" | "dot" as name)):
                if "'stable'" not in ast.unparse(node):
                    yield f"{node.lineno}: {name}"


def test_what_decides_is_computed_alike_on_every_machine() -> None:
    for text in ("a @ b", "x**0.5", "np.exp(x)", "self.random.normal(3)", "x.argsort()", "math.log2(x)"):
        assert [*inexact(ast.parse(text))], text
    found = [
        f"{path.relative_to(ROOT)}:{x}"
        for folder in DECIDING
        for path in sorted((ROOT / folder).rglob("*.py"))
        for x in inexact(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


def test_exponentials() -> None:
    x = -np.linspace(0.0, 5.0, 50)
    np.testing.assert_allclose(exponentials(x), np.exp(x), rtol=0.013)
    assert not exponentials(np.array([-1025.0, -1e300])).any()
