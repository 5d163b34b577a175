"""The matrix products of HLO: the instructions that multiply matrices, with sizes and units."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbp.rates.matmuls import VECTOR
from sbp.runtime.hlo.parser import Instruction, Tokens, integers, pairs, unquote
from sbp.runtime.hlo.shapes import ArrayShape, arrays


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """`count` products of [batch, m, k] by [batch, k, n].

    Arguments:
      operands: the units that compute it, as in `sbp.rates.matmuls.matmul_seconds`.
      passes: how often they run, for an algorithm that splits operands into parts.
      fused: whether they follow each other in one kernel, one's result an operand of the next.
    """

    batch: int
    m: int
    n: int
    k: int
    operands: str
    count: float = 1.0
    passes: int = 1
    fused: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.count * self.batch * self.m * self.n * self.k


# Element type -> units. bfloat16 and float16 run at one rate, and so do 8-bit types.
_UNITS = {"f64": "f64", "f32": "f32", "c64": "f32", "c128": "f64", "f16": "bf16", "bf16": "bf16"}
# Algorithm of a dot -> units, and how many passes it takes.
_ALGORITHMS = {
    "dot_f32_f32_f32": (VECTOR, 1),
    "dot_f64_f64_f64": ("f64", 1),
    "dot_tf32_tf32_f32": ("f32", 1),
    "dot_tf32_tf32_f32_x3": ("f32", 3),
    "dot_bf16_bf16_bf16": ("bf16", 1),
    "dot_bf16_bf16_f32": ("bf16", 1),
    "dot_bf16_bf16_f32_x3": ("bf16", 3),
    "dot_bf16_bf16_f32_x6": ("bf16", 6),
    "dot_bf16_bf16_f32_x9": ("bf16", 9),
    "dot_f16_f16_f16": ("bf16", 1),
    "dot_f16_f16_f32": ("bf16", 1),
    "dot_any_f8_any_f8_f32": ("f8", 1),
    "dot_any_f8_any_f8_f32_fast_accum": ("f8", 1),
}


def products_of(instruction: Instruction, operands: Sequence[ArrayShape]) -> tuple[MatrixProduct, ...] | None:
    """The matrix products of one instruction; None if it has no known ones.

    Arguments:
      operands: the shapes of its operands.
    """
    reader = _OPCODES.get(instruction.opcode)
    if instruction.opcode == "custom-call":
        target = unquote("".join(instruction.attributes.get("custom_call_target", ())))
        reader = next((r for name, r in _TARGETS.items() if name in target), None)
    return reader(instruction, operands) if reader else None


def _dot(x: Instruction, operands: Sequence[ArrayShape]) -> tuple[MatrixProduct, ...]:
    dims = {
        key: integers(x.attributes.get(key, ()))
        for side in ("lhs", "rhs")
        for key in (f"{side}_batch_dims", f"{side}_contracting_dims")
    }
    precision = [t for t in x.attributes.get("operand_precision", ()) if t.isalpha()]
    algorithm = "".join(x.attributes.get("algorithm", ()))
    sides = ("lhs_batch_dims", "lhs_contracting_dims", "rhs_batch_dims", "rhs_contracting_dims")
    return _contraction(operands, [dims[key] for key in sides], precision, algorithm)


def _gemm(x: Instruction, operands: Sequence[ArrayShape]) -> tuple[MatrixProduct, ...]:
    """`__cublas$gemm`, `__cublas$lt$matmul` and its float8 form."""
    config: Mapping[str, Any] = x.config().get("gemm_backend_config", {})
    numbers: Mapping[str, Any] = config.get("dot_dimension_numbers", {})
    keys = ("lhs_batch", "lhs_contracting", "rhs_batch", "rhs_contracting")
    dims = [[int(d) for d in numbers.get(f"{key}_dimensions", ())] for key in keys]
    precision: Mapping[str, Any] = config.get("precision_config", {})
    words = [str(p).lower() for p in precision.get("operand_precision", ())]
    # Other than the kernels that XLA makes itself, cuBLAS is let use TF32 for "high" too.
    words = [word for word in words if word != "high"]
    algorithm = str(precision.get("algorithm", "")).lower().removeprefix("alg_")
    return _contraction(operands, dims, words, algorithm)


def _contraction(
    operands: Sequence[ArrayShape], dims: Sequence[Sequence[int]], precision: Sequence[str], algorithm: str
) -> tuple[MatrixProduct, ...]:
    left, right = operands[:2]
    left_batch, left_contracted, right_batch, right_contracted = dims
    batch = math.prod(left.dims[d] for d in left_batch)
    k = math.prod(left.dims[d] for d in left_contracted)
    m = _rest(left, (*left_batch, *left_contracted))
    n = _rest(right, (*right_batch, *right_contracted))
    units, passes = _ALGORITHMS.get(algorithm, (_units(left, right, precision), 1))
    # A complex product is four real ones.
    count = 4.0 if left.dtype.startswith("c") else 1.0
    return (MatrixProduct(batch, m, n, k, units, count, passes),)


def _rest(shape: ArrayShape, without: Sequence[int]) -> int:
    return math.prod(size for d, size in enumerate(shape.dims) if d not in without)


def _units(left: ArrayShape, right: ArrayShape, precision: Sequence[str]) -> str:
    """The units that multiply two arrays: XLA cuts float32 to TF32 unless a precision is asked for."""
    wide = max((left, right), key=lambda a: a.bytes / max(1, a.elements))
    units = _UNITS.get(wide.dtype, "f8")
    exact = units == "f32" and any(word != "default" for word in precision)
    return VECTOR if exact else units


def _convolution(x: Instruction, operands: Sequence[ArrayShape]) -> tuple[MatrixProduct, ...]:
    """A product of [positions, window x channels] by [window x channels, features], per group."""
    return _by_window(x, arrays(x.shape)[0], operands[0], operands[1])


def _cudnn(x: Instruction, operands: Sequence[ArrayShape]) -> tuple[MatrixProduct, ...]:
    """A cuDNN convolution; its labels are those of the forward one, whichever of the three it is."""
    target = unquote("".join(x.attributes.get("custom_call_target", ())))
    first, second, result = operands[0], operands[1], arrays(x.shape)[0]
    if "BackwardInput" in target:  # (gradient of the result, kernel) -> gradient of the input
        return _by_window(x, first, result, second)
    if "BackwardFilter" in target:  # (input, gradient of the result) -> gradient of the kernel
        return _by_window(x, second, first, result)
    return _by_window(x, result, first, second)


def _by_window(
    x: Instruction, result: ArrayShape, image: ArrayShape, kernel: ArrayShape
) -> tuple[MatrixProduct, ...]:
    groups = int("".join(x.attributes.get("feature_group_count", ("1",))))
    groups *= int("".join(x.attributes.get("batch_group_count", ("1",))))
    of_image, _, rest = "".join(x.attributes.get("dim_labels", ())).partition("_")
    of_kernel, _, of_result = rest.partition("->")
    features = kernel.dims[of_kernel.index("o")]
    k, n, m = kernel.elements // features, features // groups, result.elements // features
    units = _units(image, kernel, _precision(x))
    spatial = sorted(label for label in of_kernel if label.isdecimal())
    sizes = [(image.dims[of_image.index(d)], result.dims[of_result.index(d)]) for d in spatial]
    return (MatrixProduct(groups, m, n, k, units, _real_share(x, sizes)),)


def _real_share(x: Instruction, sizes: Sequence[tuple[int, int]]) -> float:
    """The share of a convolution's products that have an element of the image, not of padding, in them.

    Arguments:
      sizes: (image, result) of each spatial dim.
    """
    window = pairs(x.attributes.get("window", ()))
    share = 1.0
    for d, (image, result) in enumerate(sizes):
        size, stride, spread, apart = (
            int(window[key].split("x")[d]) if key in window else 1
            for key in ("size", "stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window["pad"].split("x")[d].split("_")[0]) if "pad" in window else 0
        at = np.arange(result)[:, None] * stride + np.arange(size) * apart - low
        real = (at >= 0) & (at % spread == 0) & (at // spread < image)
        share *= float(real.mean()) if real.size else 0.0
    return share


def _precision(x: Instruction) -> list[str]:
    tokens: Tokens = x.attributes.get("operand_precision", ())
    return [t for t in tokens if t.isalpha()]


def _attention(x: Instruction, operands: Sequence[ArrayShape]) -> tuple[MatrixProduct, ...] | None:
    """A fused attention of cuDNN: two products forward, five backward; half of each if it is causal."""
    config: Mapping[str, Any] = x.config().get("cudnn_fmha_backend_config", {})
    shape = [int(d) for d in config.get("intermediate_tensor_shape", {}).get("dimensions", ())]
    if len(shape) != 4:
        return None
    batch, heads, queries, keys = shape
    width = operands[0].elements // (batch * heads * queries)
    backward = "Backward" in "".join(x.attributes.get("custom_call_target", ()))
    share = 0.5 if "CAUSAL" in str(config.get("mask_type", "")) else 1.0
    count = (5 if backward else 2) * share
    units = _units(operands[0], operands[1], ())
    return (MatrixProduct(batch * heads, queries, keys, width, units, count, fused=True),)


_Reader = Callable[[Instruction, Sequence[ArrayShape]], tuple[MatrixProduct, ...] | None]
_OPCODES: Mapping[str, _Reader] = {"dot": _dot, "convolution": _convolution}
_TARGETS: Mapping[str, _Reader] = {
    "__cublas$gemm": _gemm,
    "__cublas$lt$matmul": _gemm,
    "__cudnn$conv": _cudnn,
    "__cudnn$fmha": _attention,
}
