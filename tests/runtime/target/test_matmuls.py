"""Matrix products of HLO: sizes from the text, and the units that make them."""

from dataclasses import replace

import pytest

from sbp.rates.matmuls import VECTOR
from sbp.runtime.hlo.parser import parse
from sbp.runtime.hlo.shapes import arrays
from sbp.runtime.target.matmuls import MatrixProduct, products_of


def products(line: str, *shapes: str) -> tuple[MatrixProduct, ...] | None:
    """Those of an instruction on parameters of these shapes."""
    params = "\n".join(f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(shapes))
    text = f"HloModule m\nENTRY %e () -> f32[] {{\n{params}\n  ROOT %r = {line}\n}}\n"
    computation = parse(text).computations["e"]
    x = computation.instructions["r"]
    return products_of(x, [arrays(computation.instructions[name].shape)[0] for name in x.operands])


DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BATCHED = "lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"


def test_a_batched_dot() -> None:
    found = products(f"f32[8,256,64] dot(%p0, %p1), {BATCHED}", "bf16[256,8,128]", "bf16[8,128,64]")
    assert found == (MatrixProduct(8, 256, 64, 128, "bf16"),)
    assert found[0].flops == 2 * 8 * 256 * 64 * 128


@pytest.mark.parametrize(
    ("dtype", "attributes", "units", "passes"),
    [
        ("f32", "", "f32", 1),  # XLA cuts float32 to TF32 unless a precision is asked for
        ("f32", ", operand_precision={highest,highest}", VECTOR, 1),
        ("f32", ", operand_precision={high,high}", VECTOR, 1),
        ("f32", ", operand_precision={default,default}", "f32", 1),
        ("f32", ", algorithm=dot_tf32_tf32_f32", "f32", 1),
        ("f32", ", algorithm=dot_f32_f32_f32", VECTOR, 1),
        ("f32", ", algorithm=dot_bf16_bf16_f32_x3", "bf16", 3),
        ("bf16", "", "bf16", 1),
        ("bf16", ", operand_precision={highest,highest}", "bf16", 1),
        ("f16", "", "bf16", 1),
        ("f8e4m3fn", "", "f8", 1),
        ("s8", "", "f8", 1),
        ("f64", "", "f64", 1),
    ],
)
def test_units(dtype: str, attributes: str, units: str, passes: int) -> None:
    shapes = (f"{dtype}[4,8]", f"{dtype}[8,2]")
    assert products(f"f32[4,2] dot(%p0, %p1), {DIMS}{attributes}", *shapes) == (
        MatrixProduct(1, 4, 2, 8, units, passes=passes),
    )


def test_a_complex_product_is_four_real_ones() -> None:
    (found,) = products(f"c64[4,2] dot(%p0, %p1), {DIMS}", "c64[4,8]", "c64[8,2]") or ()
    assert found.flops == 4 * 2 * 4 * 2 * 8


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
@pytest.mark.parametrize(("precision", "units"), [("DEFAULT", "f32"), ("HIGH", "f32"), ("HIGHEST", VECTOR)])
def test_cublas(target: str, precision: str, units: str) -> None:
    config = (
        '{"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},'
        f'"precision_config":{{"operand_precision":["{precision}","{precision}"],"algorithm":"ALG_UNSET"}}}}}}'
    )
    call = f'(f32[16,32], s8[4194304]) custom-call(%p0, %p1), custom_call_target="{target}"'
    assert products(f"{call}, backend_config={config}", "f32[64,16]", "f32[64,32]") == (
        MatrixProduct(1, 16, 32, 64, units),
    )


WINDOW = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f"
IMAGE, KERNEL, RESULT = "bf16[32,56,56,64]", "bf16[128,3,3,64]", "bf16[32,56,56,128]"
# At the borders a window of 3 reaches 2 elements: 56 * 3 - 2 products in each dim.
CONVOLUTION = 2 * 32 * (56 * 3 - 2) ** 2 * 128 * 64


@pytest.mark.parametrize(
    ("opcode", "result", "operands"),
    [
        ("convolution", RESULT, (IMAGE, KERNEL)),
        ("__cudnn$convForward", RESULT, (IMAGE, KERNEL)),
        ("__cudnn$convBackwardInput", IMAGE, (RESULT, KERNEL)),
        ("__cudnn$convBackwardFilter", KERNEL, (IMAGE, RESULT)),
    ],
)
def test_the_three_convolutions_are_of_one_size(opcode: str, result: str, operands: tuple[str, str]) -> None:
    line = f'({result}, u8[0]) custom-call(%p0, %p1), {WINDOW}, custom_call_target="{opcode}"'
    if opcode == "convolution":
        line = f"{result} convolution(%p0, %p1), {WINDOW}"
    (found,) = products(line, *operands) or ()
    assert (found.flops, found.operands) == (pytest.approx(CONVOLUTION), "bf16")


def test_what_is_spread_out_with_zeros_is_not_multiplied() -> None:
    """The gradient of a convolution of stride 2 by its input: every other row and column is zero."""
    line = "f32[1,8,8,1] convolution(%p0, %p1), window={size=2x2 pad=1_1x1_1 lhs_dilate=2x2}, "
    (found,) = products(line + "dim_labels=b01f_01io->b01f", "f32[1,4,4,1]", "f32[2,2,1,1]") or ()
    assert found.flops == pytest.approx(2 * 8 * 8)


def test_a_grouped_convolution_multiplies_less() -> None:
    line = f"{RESULT} convolution(%p0, %p1), {WINDOW}, feature_group_count=8"
    (found,) = products(line, IMAGE, "bf16[128,3,3,8]") or ()
    assert replace(found, count=1) == MatrixProduct(8, 32 * 56 * 56, 16, 72, "bf16")


def test_fused_attention_of_cudnn() -> None:
    q = "bf16[8,1024,16,64]"
    shape = (
        '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["8","16","1024","1024"]},'
    )
    forward = f'({q}, u8[0]) custom-call(%p0, %p1, %p2), custom_call_target="__cudnn$fmhaSoftmax", '
    backward = forward.replace("Softmax", "SoftmaxBackward")
    one = 2.0 * 8 * 16 * 1024 * 1024 * 64
    for line, mask, times in ((forward, "NO_MASK", 2), (forward, "CAUSAL", 1), (backward, "NO_MASK", 5)):
        config = f'backend_config={shape}"mask_type":"{mask}"}}}}'
        (found,) = products(line + config, q, q, q) or ()
        assert found.flops == times * one, (line, mask)


def test_what_multiplies_no_matrices() -> None:
    assert products("f32[4] add(%p0, %p0)", "f32[4]") is None
    assert products('f32[4] custom-call(%p0), custom_call_target="mine"', "f32[4]") is None
