"""What an instruction of HLO text says beside its operands."""

import pytest

from sbp.runtime.hlo.parser import parse


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            'backend_config={"gemm":{"beta":0,"dims":["1"]},"queue":"0"}',
            {"gemm": {"beta": 0, "dims": ["1"]}, "queue": "0"},
        ),
        (r'backend_config="{\"known_trip_count\":{\"n\":\"11\"}}"', {"known_trip_count": {"n": "11"}}),
        ("backend_config={lower = true}", {}),
        ('backend_config="opaque"', {}),
        ("index=0", {}),
    ],
)
def test_backend_config(written: str, expected: dict[str, object]) -> None:
    text = f"HloModule m\nENTRY %e (p: f32[]) -> f32[] {{\n  ROOT %p = f32[] parameter(0), {written}\n}}\n"
    assert parse(text).computations["e"].instructions["p"].config() == expected
