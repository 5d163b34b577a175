"""Operands of convolutions that are laid out anew: cuDNN takes neither JAX's kernels nor uneven padding."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp.passes.physical.fusing import ShardSizes, is_padded
from sbp.passes.physical.kernels import Buffer, Kernels
from sbp.passes.physical.program import Compute
from sbp.passes.program.graph import Const


@dataclass(frozen=True, slots=True)
class Copy:
    """An operand as a library wants it.

    Arguments:
      tensor: of which it is a copy.
      bytes: of the copy, which may be padded.
      users: the positions of the ops that read it; the first one has it made.
    """

    tensor: Buffer
    bytes: float
    users: tuple[int, ...]


def copies(k: Kernels, sizes: ShardSizes) -> Iterator[Copy]:
    """What convolutions read that others have laid out otherwise.

    XLA transposes every kernel for cuDNN (`GpuLayoutAssignment` asks for the order that it is fastest in),
    and pads what is padded unevenly before the call (`ConvPaddingLegalization`). Later convolutions of the
    same operand, which are its gradients', read the copy too.
    """
    users: dict[Buffer, list[int]] = {}
    wanted: dict[Buffer, float] = {}
    for i, op in enumerate(k.ops):
        if op.name != "conv_general_dilated" or not k.runs(i):
            continue
        assert isinstance(op.step, Compute)
        image, kernel = (k.source(i, j) for j in range(2))
        for t in (image, kernel):
            if t is not None:
                users.setdefault(t, []).append(i)
        if not _is_forward(op.step, sizes):
            continue
        padded = _padded(op.step, sizes)
        if image is not None and padded > 1:
            wanted.setdefault(image, padded * image.bytes)
        if kernel is not None:
            wanted.setdefault(kernel, kernel.bytes)
    for t, n in wanted.items():
        yield Copy(t, n, tuple(users[t]))


def _spatial(step: Compute, sizes: ShardSizes) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The spatial sizes of image, kernel and result."""
    dims = step.node.params["dimension_numbers"]
    specs = dims.lhs_spec[2:], dims.rhs_spec[2:], dims.out_spec[2:]
    values = (*step.node.inputs, *step.node.outputs)
    shapes = [x.shape if isinstance(x, Const) else sizes.shape(x) for x in values]
    image, kernel, out = ([shape[d] for d in spec] for shape, spec in zip(shapes, specs, strict=True))
    return image, kernel, out


def _is_forward(step: Compute, sizes: ShardSizes) -> bool:
    """Whether it is no gradient: those of images dilate them, those of kernels give less than they are given
    (as XLA's `ConvRewriter` tells them apart)."""
    _, kernel, out = _spatial(step, sizes)
    dilated = any(d > 1 for d in step.node.params["lhs_dilation"])
    return not dilated and all(a <= b for a, b in zip(kernel, out, strict=True))


def _padded(step: Compute, sizes: ShardSizes) -> float:
    """How many times larger an image is with its padding, if that is uneven; else 1."""
    padding: Sequence[tuple[int, int]] = step.node.params["padding"]
    image, _, _ = _spatial(step, sizes)
    if not is_padded(step.node.params):
        return 1.0
    return math.prod((n + low + high) / n for n, (low, high) in zip(image, padding, strict=True) if n)
