"""Profiles read: of CPU devices as JAX records them, of GPUs by hand, in the form that XLA gives them."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from sbp.runtime.profile.trace import STEP, traced_steps

US = 1_000_000
"""Picoseconds."""


def stat(number: int, value: str | int) -> str:
    return f"stats {{ metadata_id: {number} " + (
        f'str_value: "{value}" }}' if isinstance(value, str) else f"int64_value: {value} }}"
    )


class Space:
    """An XSpace in the text form of protocol buffers."""

    def __init__(self) -> None:
        self.planes: list[str] = []

    def plane(self, name: str, lines: dict[str, list[tuple[str, int, int, dict[str, Any]]]]) -> None:
        """Lines of events: name, start and length in microseconds, statistics."""
        names: dict[str, int] = {}
        stats: dict[str, int] = {}
        written = []
        for at, (line, events) in enumerate(lines.items()):
            body = []
            for event, start, length, said in events:
                number = names.setdefault(event, len(names) + 1)
                told = " ".join(stat(stats.setdefault(k, len(stats) + 1), v) for k, v in said.items())
                body.append(
                    f"events {{ metadata_id: {number} offset_ps: {start * US} "
                    f"duration_ps: {length * US} {told} }}"
                )
            written.append(f'lines {{ id: {at} name: "{line}" timestamp_ns: 0 {" ".join(body)} }}')
        for kind, known in (("event", names), ("stat", stats)):
            for name_, number in known.items():
                written.append(
                    f'{kind}_metadata {{ key: {number} value {{ id: {number} name: "{name_}" }} }}'
                )
        self.planes.append(f'planes {{ name: "{name}" {" ".join(written)} }}')

    def read(self) -> Any:
        return jax.profiler.ProfileData.from_text_proto(" ".join(self.planes))


def op(name: str, **more: Any) -> dict[str, Any]:
    return {"hlo_op": name, "hlo_module": "jit_step", **more}


def test_kernels_of_gpus() -> None:
    """Streams have kernels; other lines of a device say the same again, and other programs are nobody's."""
    space = Space()
    space.plane("/host:CPU", {"python": [(STEP, 100, 100, {}), (STEP, 300, 100, {}), ("jit", 0, 500, {})]})
    space.plane(
        "/device:GPU:0",
        {
            "Stream #13(Compute)": [
                ("gemm", 110, 20, op("fusion.1")),
                ("MemcpyD2D", 135, 5, {}),
                ("gemm", 310, 20, op("fusion.1")),
                ("other", 340, 10, {"hlo_op": "fusion.1", "hlo_module": "jit_other"}),
            ],
            "Stream #20(AllGather)": [("ncclDevKernel_AllGather", 120, 40, op("all-gather-start.2"))],
            "XLA Ops": [("fusion.1", 110, 20, op("fusion.1"))],
        },
    )
    space.plane("/device:GPU:1", {"Stream #13(Compute)": [("gemm", 115, 20, op("fusion.1"))]})
    first, second = traced_steps(space.read(), "jit_step")
    assert [(e.device, e.instruction, round(1e6 * e.start), round(1e6 * e.end)) for e in first.events] == [
        (0, "fusion.1", 110, 130),
        (1, "fusion.1", 115, 135),
        (0, "all-gather-start.2", 120, 160),
        (0, "", 135, 140),
    ]
    assert first.seconds == pytest.approx(100e-6)
    assert [e.instruction for e in second.events] == ["fusion.1", ""]


def test_ops_of_cpus_that_leave_work_to_other_threads() -> None:
    """The event of their end comes late; what reads them begins when they have ended."""
    space = Space()

    def begun(name: str, start: int, length: int, context: int) -> tuple[str, int, int, dict[str, Any]]:
        return name, start, length, op(name, device_ordinal=0, _p=context)

    def ended(name: str, at: int, context: int) -> tuple[str, int, int, dict[str, Any]]:
        return f"end: {name}", at, 1, {"_c": context}

    space.plane(
        "/host:CPU",
        {
            "python": [(STEP, 0, 100, {})],
            "worker": [
                begun("dot.1", 10, 2, 1),
                begun("tanh.2", 30, 5, 2),
                begun("dot.3", 40, 2, 3),
                begun("other.4", 45, 5, 4),
                ended("tanh.2", 35, 2),
                ended("other.4", 50, 4),
                ended("dot.3", 70, 3),
                ended("dot.1", 90, 1),
            ],
            "another": [("x", 0, 90, {"hlo_op": "x", "hlo_module": "jit_other", "device_ordinal": 0})],
        },
    )
    readers = {"dot.1": ("tanh.2",), "tanh.2": ("dot.3",), "dot.3": ()}
    (step,) = traced_steps(space.read(), "jit_step", readers)
    assert {e.instruction: (round(1e6 * e.start), round(1e6 * e.end)) for e in step.events} == {
        "dot.1": (10, 30),
        "tanh.2": (30, 35),
        "dot.3": (40, 70),
        "other.4": (45, 50),
    }


def test_a_profile_without_steps() -> None:
    space = Space()
    space.plane("/host:CPU", {"python": [("something", 0, 10, {})]})
    assert traced_steps(space.read(), "jit_step") == []
