"""Factorisations of devices that no level of links cuts across."""

import itertools
import math

import pytest

from sbp.hardware.hierarchies import factorisations, hierarchies


def test_1024_devices_in_hosts_of_8() -> None:
    found = hierarchies(1024, [8])
    assert found[:3] == [(1024,), (32, 32), (16, 64)]
    assert set(found[3:8]) == {(64, 16), (8, 128), (128, 8), (4, 256), (2, 512)}
    assert set(found[8:]) == {(16, 8, 8), (32, 4, 8), (64, 2, 8), (128, 4, 2)}


@pytest.mark.parametrize(
    ("devices", "domain"), [(1024, 8), (1152, 72), (1024, 72), (24, 8), (7, 8), (6, 1), (1, 8)]
)
def test_axes_lie_inside_a_domain_or_go_over_whole_ones(devices: int, domain: int) -> None:
    found = hierarchies(devices, [domain])
    inside = math.gcd(devices, domain)
    assert len(set(found)) == len(found) and found[0] == (devices,)
    for shape in found:
        assert math.prod(shape) == devices and len(shape) <= 3
        # How many neighbours stand between two devices that are one step apart on an axis.
        strides = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
        assert all(x % inside == 0 or inside % x == 0 for x in strides)


def test_several_levels() -> None:
    found = hierarchies(64, [4, 16])
    assert (4, 4, 4) in found and (4, 16) in found and (16, 4) in found
    assert (8, 8) not in found and (2, 2, 16) in found and (2, 8, 4) not in found
    assert (2, 32) in found and (32, 2) not in found


def test_few_axes() -> None:
    assert hierarchies(64, [8], 1) == [(64,)]
    assert hierarchies(64, [8], 2) == [(64,), (8, 8), (4, 16), (2, 32)]


@pytest.mark.parametrize("n", [2, 12, 36, 64, 97])
@pytest.mark.parametrize("factors", [1, 2, 3])
def test_factorisations_against_brute_force(n: int, factors: int) -> None:
    every = itertools.product(range(2, n + 1), repeat=factors)
    wanted = {t for t in every if math.prod(t) == n and list(t) == sorted(t, reverse=True)}
    found = list(factorisations(n, factors))
    assert set(found) == wanted and len(found) == len(wanted)
