"""Absent GPUs: internals of JAX and its CUDA plugin.

The plugin makes compile-only devices from a description of a chip, without CUDA libraries and without a
driver.
"""

import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any

import jax

from sbp.compat.plugin_logs import SKIP_CHECK
from sbp.errors import PlacementError, Problem


@functools.cache
def compile_only_devices(config: str, machine: str) -> Sequence[Any]:
    """Devices that XLA compiles for and that run nothing; one machine has the same objects and meshes.

    Arguments:
      config: the chip, as a GpuTargetConfigProto in text.
      machine: NVLink domains, hosts in each and devices in each, such as "1x1x8".
    """
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=config, topology=machine)
    except NotImplementedError:  # JAX has looked for CUDA's libraries before, and left the plugin out
        os.environ[SKIP_CHECK] = "1"
        importlib.import_module("jax_plugins.xla_cuda13").initialize()
        found = topologies.get_topology_desc(platform="cuda", target_config=config, topology=machine)
    return list(found.devices)


class NotHere(jax.stages.Lowered):
    """A lowered program that can be read; `compile` raises the reason why it cannot be compiled here."""

    def __init__(self, lowered: jax.stages.Lowered, problem: Problem) -> None:
        for slot in jax.stages.Lowered.__slots__:
            setattr(self, slot, getattr(lowered, slot))
        self.problem = problem

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """Raises PlacementError."""
        raise PlacementError(self.problem)
