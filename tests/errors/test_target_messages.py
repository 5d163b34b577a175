"""Every message about compiling for devices that are not here, word for word."""

import importlib.metadata
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
import sbp.hardware.catalogue
from sbp.errors import PlacementError
from sbp.rates.chips import CHIPS
from sbp.runtime.target import devices
from tests.errors.messages import Messages, check_message

FIX = "pip install 'sbp-jax[gpu-target]'"
MACHINE = "DOMAINSxHOSTSxDEVICES with at least 16 devices"
RANKS = "every rank of the placement is a device of the machine"
X = jax.ShapeDtypeStruct((16, 4), jnp.float32)


def compiling(kind: str, shape: tuple[int, ...] = (2, 8), topology: tuple[int, ...] | None = None) -> Any:
    options = sbp.Options(topology=topology)
    return sbp.compile(lambda x: x * 2, sbp.placement(kind, shape=shape), options=options).lower(X).compile()


MESSAGES: Messages = {
    "a machine that is too small": (
        lambda: devices.topology_of(sbp.placement("h100", shape=(2, 8)), (1, 1, 8)),
        PlacementError,
        "compiling for h100(data=2 x model=8)",
        "topology 1x1x8",
        MACHINE,
        RANKS,
        "2x1x8",
    ),
    "a machine of two levels": (
        lambda: devices.topology_of(sbp.placement("h100", shape=(2, 8)), (2, 8)),
        PlacementError,
        "compiling for h100(data=2 x model=8)",
        "topology 2x8",
        MACHINE,
        RANKS,
        "2x1x8",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    call, *rest = MESSAGES[name]
    check_message(call, *rest)


def test_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_message(
        lambda: compiling("h100"),
        PlacementError,
        "compiling for h100(data=2 x model=8)",
        "no jax_cuda13_plugin",
        "jax 0.12 with its CUDA plugin; no GPU, driver or CUDA library is needed",
        "XLA's compiler for GPUs is in that plugin",
        f"{FIX}; lower(...).as_text() and plan(...) need no plugin",
    )


@pytest.mark.parametrize(("jax_version", "plugin"), [("0.10.2", "0.10.2"), ("0.12.0.1", "0.12.1")])
def test_another_line(monkeypatch: pytest.MonkeyPatch, jax_version: str, plugin: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: plugin)
    monkeypatch.setattr(jax, "__version__", jax_version)
    check_message(
        lambda: compiling("h200"),
        PlacementError,
        "compiling for h200(data=2 x model=8)",
        f"jax {jax_version} with jax_cuda13_plugin {plugin}",
        "jax 0.12 with the plugin of the same version",
        "compiling for GPUs that are not here is tried on that line only",
        FIX,
    )


def test_no_such_chip() -> None:
    where = sbp.placement("tpu", shape=(8,))
    options = sbp.Options(hardware=sbp.hardware.CATALOGUE["h100"])
    check_message(
        lambda: sbp.compile(lambda x: x * 2, where, options=options).lower(X).compile(),
        PlacementError,
        "compiling for tpu(x=8)",
        "kind 'tpu', of which there is no device here",
        ", ".join(sorted(CHIPS)),
        "XLA compiles for a device that is not here from a description of its chip",
        "sbp.placement('h100', shape=(8,))",
    )
