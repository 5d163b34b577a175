"""Devices that are not here, for XLA to compile for: which a placement needs, and whether they can be had."""

import contextlib
import importlib.metadata
import importlib.util
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sbp.compat.gpu import compile_only_devices
from sbp.compat.ops import assumed_cudnn, has_cudnn
from sbp.compat.plugin_logs import PLUGIN
from sbp.errors import PlacementError, Problem
from sbp.hardware.catalogue import PLATFORMS
from sbp.placement import Placement
from sbp.rates.chips import CHIPS, Chip

LINE, EXTRA = (0, 12), "pip install 'sbp-jax[gpu-target]'"

# A GpuTargetConfigProto: what XLA must know of a chip. What all chips from Ampere on have alike stands here.
TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048
  core_count: {chip.cores}
  fpus_per_core: {chip.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {chip.l2_bytes}
  clock_rate_ghz: {clock}
  device_memory_size: {chip.memory_bytes}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {chip.capability[0]} minor: {chip.capability[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 5 }}
device_description_str: "{chip.description}"
"""


def chip_of(placement: Placement) -> Chip | None:
    """The chip that a placement names; None if XLA cannot be asked to compile for it from afar.

    >>> from sbp.placement import placement
    >>> chip_of(placement("gpu", shape=(8,))).name, chip_of(placement("cpu", shape=(8,)))
    ('h100', None)
    """
    return CHIPS.get(PLATFORMS.get(placement.kind, placement.kind))


def cudnn_of(placement: Placement) -> contextlib.AbstractContextManager[None]:
    """A context to trace and lower a program of a placement in, whose GPUs and cuDNN need not be here.

    Where a placement names a chip, JAX is told of that one; "gpu" is whatever is here, if cuDNN is.
    """
    chip = chip_of(placement)
    if chip is None or (placement.kind in PLATFORMS and has_cudnn()):
        return contextlib.nullcontext()
    return assumed_cudnn(chip.capability)


def missing_devices(placement: Placement) -> Problem | None:
    """Why nothing can be compiled here for a placement whose devices are not; None if it can."""
    where = f"compiling for {placement}"
    if chip_of(placement) is None:
        return Problem(
            "placement",
            where,
            f"kind {placement.kind!r}, of which there is no device here",
            ", ".join(sorted(CHIPS)),
            "XLA compiles for a device that is not here from a description of its chip",
            f"sbp.placement('h100', shape={placement.shape})",
        )
    if importlib.util.find_spec(PLUGIN) is None:
        return Problem(
            "placement",
            where,
            f"no {PLUGIN}",
            f"jax {LINE[0]}.{LINE[1]} with its CUDA plugin; no GPU, driver or CUDA library is needed",
            "XLA's compiler for GPUs is in that plugin",
            f"{EXTRA}; lower(...).as_text() and plan(...) need no plugin",
        )
    return _another_line(where)


def _another_line(where: str) -> Problem | None:
    """Whether the plugin belongs to another JAX than this one, or this one is too old."""
    plugin = importlib.metadata.version(PLUGIN.replace("_", "-"))
    line = tuple(map(int, jax.__version__.split(".")[:2]))
    same = plugin.split(".")[:3] == jax.__version__.split(".")[:3]
    if line >= LINE and same:
        return None
    return Problem(
        "placement",
        where,
        f"jax {jax.__version__} with {PLUGIN} {plugin}",
        f"jax {LINE[0]}.{LINE[1]} with the plugin of the same version",
        "compiling for GPUs that are not here is tried on that line only",
        EXTRA,
    )


def topology_of(placement: Placement, given: Sequence[int] | None = None) -> tuple[int, int, int]:
    """The machine that a placement's ranks are part of: NVLink domains, hosts in each, devices in each.

    Arguments:
      given: the machine, if it is not the one that the chip is usually sold in.

    Raises:
      PlacementError: if it has too few devices.

    >>> from sbp.placement import placement
    >>> topology_of(placement("h100", shape=(16, 8))), topology_of(placement("gb200", shape=(8,)))
    ((16, 1, 8), (1, 18, 4))
    """
    chip = chip_of(placement)
    assert chip is not None
    need = max(placement.ranks) + 1
    if given is None:
        if need <= chip.host_devices and chip.domain_hosts == 1:
            return 1, 1, need
        return -(-need // chip.domain_devices), chip.domain_hosts, chip.host_devices
    sizes = tuple(given)
    if len(sizes) != 3 or any(not isinstance(n, int) or n < 1 for n in sizes) or math.prod(sizes) < need:
        usual = topology_of(placement)
        raise PlacementError(
            Problem(
                "placement",
                f"compiling for {placement}",
                f"topology {'x'.join(map(str, sizes))}",
                f"DOMAINSxHOSTSxDEVICES with at least {need} devices",
                "every rank of the placement is a device of the machine",
                "x".join(map(str, usual)),
            )
        )
    domains, hosts, devices = sizes
    return domains, hosts, devices


def absent_mesh(placement: Placement, topology: Sequence[int] | None = None) -> Mesh:
    """The mesh of a placement over devices that are not here: XLA compiles for it, nothing runs on it.

    Its devices are those of the machine in their order, whatever the placement's ranks are: from afar XLA's
    compiler for GPUs takes no other order. Which ranks share a host is left to the simulator.

    Raises:
      PlacementError: if there is no plugin, no description of the chip, or another line of JAX.
    """
    problem = missing_devices(placement)
    if problem is not None:
        raise PlacementError(problem)
    chip = chip_of(placement)
    assert chip is not None
    devices = compile_only_devices(target_text(chip), "x".join(map(str, topology_of(placement, topology))))
    grid = np.array(devices[: placement.size], dtype=object).reshape(placement.shape)
    return Mesh(grid, placement.axes, axis_types=(AxisType.Auto,) * placement.ndim)


def target_text(chip: Chip) -> str:
    """The chip as XLA reads it."""
    shared = 233472 if chip.capability >= (9, 0) else 167936
    return TARGET.format(
        chip=chip,
        shared=shared,
        optin=shared - 1024,
        bandwidth=int(chip.memory_bytes_per_second),
        clock=chip.clock_hertz / 1e9,
    )
