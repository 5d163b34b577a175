"""A machine of one's own: a TOML file read and written, and what its figures change."""

from dataclasses import replace
from pathlib import Path

import pytest

import sbp
from sbp.errors import PlacementError
from sbp.hardware.catalogue import ANY, CATALOGUE, Hardware, Link, hardware_for
from sbp.hardware.file import hardware_from, hardware_text
from sbp.passes.render.files import plan_json
from sbp.rates.tables import CollectiveCurve
from tests.golden import two_layers

H100 = hardware_for("h100")
OWN = """
memory_bytes = "16 GiB"
memory_bytes_per_second = "0.5 TB/s"
vector_flops_per_second = 2e12
launch_seconds = "2 us"
efficiency = 1.0

[matrix_flops_per_second]
bfloat16 = "100 TFLOP/s"
float32 = 50e12

[[links]]
devices = 4
bytes_per_second = "100 GB/s"
latency_seconds = "5 us"

[[links]]
devices = 64
bytes_per_second = "200 Gb/s"
latency_seconds = "20 us"
"""


def written(folder: Path, text: str) -> Hardware:
    file = folder / "ours.toml"
    file.write_text(text, encoding="utf-8")
    return hardware_from(file)


def test_a_machine_of_its_own_figures(tmp_path: Path) -> None:
    assert written(tmp_path, OWN) == Hardware(
        name="ours",
        flops_per_second=((2, 100e12), (4, 50e12)),
        vector_flops_per_second=2e12,
        memory_bytes_per_second=0.5e12,
        memory_bytes=2.0**34,
        links=(Link(4, 100e9, 5e-6), Link(64, 25e9, 20e-6)),
        efficiency=1.0,
        launch_seconds=2e-6,
    )


def test_what_is_not_said_is_as_in_the_catalogue(tmp_path: Path) -> None:
    assert written(tmp_path, 'like = "h100"') == replace(H100, name="ours")
    found = written(tmp_path, 'like = "h100"\nname = "h100 pcie"\nmemory_bytes = "94GB"')
    assert found == replace(H100, name="h100 pcie", memory_bytes=94e9)
    nvlink, nic = H100.links
    found = written(
        tmp_path, 'like = "h100"\n[[links]]\ndevices = 4\n[[links]]\nbytes_per_second = "400 Gb/s"'
    )
    assert found.links == (replace(nvlink, devices=4), replace(nic, bytes_per_second=50e9))


def test_a_third_level_of_links(tmp_path: Path) -> None:
    text = 'like = "gb200"\n[[links]]\n[[links]]\ndevices = 1152\n[[links]]\n'
    found = written(tmp_path, text + "bytes_per_second = 1e9\nlatency_seconds = 1e-3")
    assert [link.devices for link in found.links] == [72, 1152, ANY]
    near, far = (found.collective_seconds("all_gather", 1e9, ranks) for ranks in (range(1152), range(2304)))
    assert far > 10 * near


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"])
def test_a_slower_network_card_counts_between_hosts_only(kind: str) -> None:
    nvlink, nic = H100.links
    slow = replace(H100, links=(nvlink, replace(nic, bytes_per_second=nic.bytes_per_second / 10)))
    inside, across = range(8), range(16)
    assert slow.collective_seconds(kind, 1e8, inside) == H100.collective_seconds(kind, 1e8, inside)
    ratio = slow.collective_seconds(kind, 1e8, across) / H100.collective_seconds(kind, 1e8, across)
    assert 5 < ratio < 10


def test_a_slower_nvlink_goes_by_formula() -> None:
    nvlink, nic = H100.links
    slow = replace(H100, links=(replace(nvlink, bytes_per_second=1e9), nic))
    assert slow.collective_seconds("all_gather", 1e9, range(8)) == pytest.approx(1.0, rel=0.01)


def test_smaller_domains_are_crossed_sooner() -> None:
    nvlink, nic = H100.links
    four = replace(H100, links=(replace(nvlink, devices=4), nic))
    assert four.collective_seconds("all_reduce", 1e8, range(4)) == H100.collective_seconds(
        "all_reduce", 1e8, range(4)
    )
    assert four.collective_seconds("all_reduce", 1e8, range(8)) > 2 * H100.collective_seconds(
        "all_reduce", 1e8, range(8)
    )


def test_products_follow_the_peak() -> None:
    """A rate of one's own scales what was measured; the other types stay."""
    half = tuple((size, rate / (2 if size == 2 else 1)) for size, rate in H100.flops_per_second)
    slow = replace(H100, flops_per_second=half)
    shape = (1, 4096, 4096, 4096)
    assert slow.product_seconds(*shape, 2) == pytest.approx(2 * H100.product_seconds(*shape, 2))
    assert slow.product_seconds(*shape, 4) == H100.product_seconds(*shape, 4)


CURVES = (
    ("all_reduce", CollectiveCurve(2, 4, (1 << 10, 1 << 20), (1e-5, 1e-3))),
    ("all_reduce", CollectiveCurve(8, 1, (1 << 10, 1 << 20), (4e-5, 4e-3))),
)


def test_measured_curves_count_inside_their_level() -> None:
    base = Hardware("x", ((4, 1e12),), 1e12, 1e11, 1e10, (Link(8, 1e9, 1e-6), Link(ANY, 1e8, 1e-4)))
    curved = replace(base, curves=CURVES)

    def seconds(ranks: int, kind: str = "all_reduce", of: Hardware = curved) -> float:
        return of.collective_seconds(kind, 2 * (ranks - 1) / ranks * (1 << 20), range(ranks))

    assert (seconds(2), seconds(8)) == pytest.approx((1e-3, 4e-3))
    assert seconds(4) == pytest.approx(2e-3)  # between both, log-linear
    assert seconds(16) == seconds(16, of=base)  # outside the level
    assert seconds(8, "all_gather") == seconds(8, "all_gather", base)  # nothing was measured of it


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    machine = replace(CATALOGUE["cpu"], name='a "b"', curves=CURVES, memory_bytes=3e9, launch_seconds=1e-6)
    text = hardware_text(machine, {"": "two\nlines", "links": "of threads", "end": "end"})
    assert text.startswith("# two\n# lines\nname") and text.endswith("# end\n")
    assert written(tmp_path, text) == machine


def test_groups_that_nothing_connects(tmp_path: Path) -> None:
    machine = written(tmp_path, OWN)
    assert machine.link(range(64)) == machine.links[1]
    with pytest.raises(PlacementError, match="at most 64 devices"):
        machine.link(range(65))


def test_a_plan_for_it_is_saved_with_it(tmp_path: Path) -> None:
    machine = replace(written(tmp_path, OWN), curves=CURVES)
    program = sbp.compile(
        two_layers.step, sbp.placement("gpu", shape=(2, 4)), options=sbp.Options(hardware=machine)
    )
    plan = program.plan(*two_layers.step_args())
    assert str(plan).startswith("step on gpu(data=2 x model=4), planned for ours")
    file = tmp_path / "plan.json"
    plan.save(file)
    assert sbp.load_plan(file).hardware == machine and plan_json(sbp.load_plan(file)) == file.read_text()
