"""`calibrate` on forced CPU devices: that figures are there, and that a plan can be made with them."""

from pathlib import Path

import jax
import pytest

import sbp
from sbp.__main__ import main
from sbp.errors import PlacementError
from sbp.hardware.catalogue import ANY
from sbp.hardware.file import hardware_from
from sbp.rates.collectives import KINDS
from sbp.rates.tables import CollectiveCurve
from sbp.runtime.calibrate import measure as module
from sbp.runtime.calibrate.measure import SMALL, Calibration, MeasuringEffort, calibrate, fitted_link
from tests.golden import two_layers


@pytest.fixture(scope="module")
def found() -> Calibration:
    """Of four devices."""
    return calibrate(jax.devices("cpu")[:4], "four", SMALL)


def test_every_figure_is_positive(found: Calibration) -> None:
    h = found.hardware
    rates = [rate for _, rate in h.flops_per_second]
    times = [t for _, c in h.curves for t in c.seconds]
    figures = (h.vector_flops_per_second, h.memory_bytes_per_second, h.memory_bytes, h.launch_seconds)
    assert min(*rates, *times, *figures) > 0
    assert [size for size, _ in h.flops_per_second] == [2, 4, 8]
    assert (h.platform, h.links[0].devices, found.devices) == ("cpu", ANY, 4)
    assert h.links[0].bytes_per_second > 0 and h.links[0].latency_seconds > 0


def test_every_collective_over_every_group(found: Calibration) -> None:
    curves = found.hardware.curves
    assert {(kind, c.ranks, c.groups) for kind, c in curves} == {
        (kind, ranks, 4 // ranks) for kind in KINDS for ranks in (2, 4)
    }
    assert all(list(c.seconds) == sorted(c.seconds) and len(c.seconds) == len(c.sizes) for _, c in curves)


def test_the_file_says_the_same(found: Calibration, tmp_path: Path) -> None:
    file = tmp_path / "four.toml"
    found.save(file)
    assert file.read_text().startswith("# 4 x cpu, measured 20") and jax.__version__ in file.read_text()
    machine = hardware_from(file)
    assert machine.name == "four"
    assert machine.memory_bytes == pytest.approx(found.hardware.memory_bytes, rel=1e-3)
    assert [kind for kind, _ in machine.curves] == [kind for kind, _ in found.hardware.curves]
    options = sbp.Options(hardware=machine)
    plan = sbp.compile(two_layers.step, sbp.placement("cpu", shape=(2, 2)), options=options)
    assert plan.plan(*two_layers.small_args).hardware == machine


def test_what_is_printed(found: Calibration) -> None:
    text = str(found)
    assert text.startswith("four: 4 x cpu, each:") and "all-to-all over 4 devices" in text
    assert "float32 products" in text


def test_of_one_device_the_links_are_left_to_be_written(tmp_path: Path) -> None:
    one = calibrate(jax.devices("cpu")[:1], "one", SMALL)
    assert one.hardware.links == () and one.hardware.curves == ()
    file = tmp_path / "one.toml"
    one.save(file)
    with pytest.raises(sbp.SbpError, match="no links"):
        hardware_from(file)
    shown = file.read_text()
    written, rest = shown.split("# [[links]]", 1)
    file.write_text(written + "[[links]]" + rest.replace("\n# ", "\n").replace("\n#\n", "\n"))
    assert [link.devices for link in hardware_from(file).links] == [8, ANY]


def test_the_link_that_explains_the_curves() -> None:
    """Curves of a known latency and rate give both back."""
    sizes = (1 << 10, 1 << 16, 1 << 22)

    def curve(kind: str, ranks: int, share: float) -> tuple[str, CollectiveCurve]:
        seconds = tuple(2e-5 + share * size / 3e9 for size in sizes)
        return kind, CollectiveCurve(ranks, 1, sizes, seconds)

    curves = [curve("all_reduce", 4, 1.5), curve("all_gather", 2, 0.5), curve("permute", 4, 1.0)]
    link = fitted_link(curves, 8)
    assert (link.devices, link.latency_seconds) == (8, pytest.approx(2e-5))
    assert link.bytes_per_second == pytest.approx(3e9)


def test_no_devices() -> None:
    with pytest.raises(PlacementError, match="at least one"):
        calibrate([])


@pytest.mark.parametrize("devices", ["0", "-3", "1000"])
def test_no_number_of_devices(capsys: pytest.CaptureFixture[str], devices: str) -> None:
    assert main(["calibrate", "--devices", devices]) == 1
    assert "a whole number from 1 to 8" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--out", "no/such/folder/m.toml"]) == 1
    assert "a folder that is there" in capsys.readouterr().err


def test_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With as little effort as tests can have; the plan is made for the file that it writes."""
    file = tmp_path / "pair.toml"
    monkeypatch.setattr(
        module.calibrate,
        "__defaults__",
        (None, "", MeasuringEffort(0.0, 1, 1, (8,), 1.0, 4096, (64,)), print),
    )
    assert main(["calibrate", "--devices", "2", "--out", str(file)]) == 0
    text = capsys.readouterr().out
    assert "pair: 2 x cpu, each:" in text and text.rstrip().endswith(f"saved {file}")
    step = f"{two_layers.__file__}:step"
    assert main(["plan", step, "--placement", "cpu:2x4", "--hardware", str(file)]) == 0
    assert "planned for pair" in capsys.readouterr().out
