"""Every message about a file of hardware."""

from pathlib import Path
from typing import Any

import pytest

from sbp.errors import ArgumentError, PlacementError
from sbp.hardware.catalogue import Hardware, Link
from sbp.hardware.file import hardware_from
from tests.errors.messages import check_message

KEYS = (
    "name, efficiency, merges_collectives, like, platform, memory_bytes, memory_bytes_per_second, "
    "vector_flops_per_second, launch_seconds, matrix_flops_per_second, links, collectives"
)
NEEDED = "memory_bytes, memory_bytes_per_second, vector_flops_per_second, matrix_flops_per_second, links"
UNKNOWN = "an estimate needs it, and there is no `like` to take it from"
OWN = """
like = "cpu"
[[collectives]]
kind = "all_reduce"
devices = 2
bytes = [1, 2]
seconds = [1, 2]
"""
# name -> (the file, at which key, got, legal, why, try)
MESSAGES: dict[str, tuple[str, str, str, str, str, str]] = {
    "a misspelt key": (
        'like = "h100"\nmemory_byte = 3',
        "",
        "key 'memory_byte'",
        KEYS,
        "nothing reads such a key",
        "did you mean 'memory_bytes'?",
    ),
    "a key of something else": (
        'like = "h100"\nvendor = "x"',
        "",
        "key 'vendor'",
        KEYS,
        "nothing reads such a key",
        "leave it out; a remark begins with #",
    ),
    "a missing key": (
        "memory_bytes = 1\nmemory_bytes_per_second = 1\nmatrix_flops_per_second.float32 = 1\n"
        "[[links]]\nbytes_per_second = 1\nlatency_seconds = 0",
        "",
        "no vector_flops_per_second",
        f"all of {NEEDED}",
        UNKNOWN,
        'vector_flops_per_second = "67 TFLOP/s"',
    ),
    "another entry": (
        'like = "h10"',
        ": like",
        "'h10'",
        "a100, h100, h200, b200, gb200, cpu",
        "it is the entry of the catalogue to start from",
        "did you mean 'h100'?",
    ),
    "another platform": (
        'like = "h100"\nplatform = "rocm"',
        ": platform",
        "'rocm'",
        "gpu, cpu, tpu",
        "it is the JAX platform of the device",
        '"gpu"',
    ),
    "no name": ('like = "h100"\nname = 1', ": name", "1", "a text", "plans print it", 'name = "our_h100"'),
    "another unit": (
        'like = "h100"\nmemory_bytes = "80 GB/s"',
        ": memory_bytes",
        "'80 GB/s'",
        "bytes as a number above 0, or a text with one of the units GB, TB, GiB, TiB",
        "it is measured in bytes",
        '"80GB"',
    ),
    "a negative time": (
        'like = "h100"\nlaunch_seconds = -1e-6',
        ": launch_seconds",
        "-1e-06",
        "seconds as a number from 0 on, or a text with one of the units ms, us",
        "it is measured in seconds",
        '"10 us"',
    ),
    "a rate of nothing": (
        'like = "h100"\nmatrix_flops_per_second.float8 = 0',
        ": matrix_flops_per_second.float8",
        "0",
        "FLOP per second as a number above 0, or a text with one of the units GFLOP/s, TFLOP/s",
        "it is measured in FLOP per second",
        '"989 TFLOP/s"',
    ),
    "a percentage": (
        'like = "h100"\nefficiency = 70',
        ": efficiency",
        "70",
        "a number above 0, at most 1",
        "it is the share of their peak rate that large matrix products reach",
        "efficiency = 0.7",
    ),
    "a word for a flag": (
        'like = "h100"\nmerges_collectives = "yes"',
        ": merges_collectives",
        "'yes'",
        "true or false",
        "it says whether XLA merges small collectives by itself, as it does on GPUs",
        "merges_collectives = true",
    ),
    "one rate for all types": (
        'like = "h100"\nmatrix_flops_per_second = 1e12',
        ": matrix_flops_per_second",
        "1000000000000.0",
        "a table with some of float8, bfloat16, float32, float64",
        "products are rated by the type of their operands",
        'matrix_flops_per_second.bfloat16 = "989 TFLOP/s"',
    ),
    "links without brackets": (
        'like = "h100"\n[links]\ndevices = 4',
        ": links",
        "{'devices': 4}",
        "tables, one for each level",
        "links are given by level, from the innermost out",
        '[[links]] with bytes_per_second = "400 Gb/s" and latency_seconds = "10 us"',
    ),
    "a level without a rate": (
        'like = "cpu"\n[[links]]\ndevices = 8\n[[links]]\nlatency_seconds = 1e-5',
        ": links[1]",
        "no bytes_per_second",
        "all of bytes_per_second, latency_seconds",
        UNKNOWN,
        'bytes_per_second = "400 Gb/s"',
    ),
    "a level without devices": (
        'like = "cpu"\n[[links]]\n[[links]]\nbytes_per_second = 1\nlatency_seconds = 1e-5',
        ": links[0]",
        "no devices",
        "all of devices",
        "there is a level around this one",
        "devices = 8",
    ),
    "levels that do not nest": (
        'like = "h100"\n[[links]]\n[[links]]\ndevices = 12',
        ": links[1].devices",
        "12",
        "a multiple of 8",
        "so many consecutive devices share this level, which is made of whole ones of the level inside",
        "devices = 64",
    ),
    "curves beside those of a chip": (
        OWN.replace('"cpu"', '"h100"'),
        ": collectives",
        "curves of its own",
        'none beside like = "h100"',
        "collectives of h100 go by what was measured on it",
        "leave out one of the two",
    ),
    "curves without brackets": (
        'like = "cpu"\ncollectives = 1',
        ": collectives",
        "1",
        "tables, one for each curve",
        "each is a collective by size",
        "[[collectives]]",
    ),
    "a curve without sizes": (
        OWN.replace("bytes = [1, 2]", ""),
        ": collectives[0]",
        "no bytes",
        "all of kind, devices, bytes, seconds",
        "a curve is made of all of these",
        "bytes = [4096, 1048576]",
    ),
    "a curve of another kind": (
        OWN.replace("all_reduce", "allreduce"),
        ": collectives[0].kind",
        "'allreduce'",
        "all_reduce, all_gather, reduce_scatter, all_to_all, permute",
        "these are the collectives that plans have",
        "did you mean 'all_reduce'?",
    ),
    "a curve of one device": (
        OWN.replace("devices = 2", "devices = 1"),
        ": collectives[0].devices",
        "1",
        "a whole number of at least 2",
        "so many devices talk to each other",
        "devices = 8",
    ),
    "a curve of no groups": (
        OWN + "groups = 0",
        ": collectives[0].groups",
        "0",
        "a whole number of at least 1",
        "so many groups ran at once",
        "groups = 1",
    ),
    "sizes that fall": (
        OWN.replace("bytes = [1, 2]", "bytes = [2, 1]"),
        ": collectives[0].bytes",
        "[2, 1]",
        "rising positive numbers",
        "each is the size of the whole tensor on one device: the output of an all-gather, else the input",
        "bytes = [4096, 1048576]",
    ),
    "a time too few": (
        OWN.replace("seconds = [1, 2]", "seconds = [1]"),
        ": collectives[0].seconds",
        "[1]",
        "2 positive numbers",
        "each is how long the collective of that size takes",
        "seconds = [1.2e-5, 3.1e-5]",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, at, *rows = MESSAGES[name]
    Path("m.toml").write_text(text, encoding="utf-8")
    check_message(lambda: hardware_from("m.toml"), ArgumentError, f"hardware_from('m.toml'){at}", *rows)


FIX = "`python -m sbp calibrate --out machine.toml` writes one of this machine"


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("= 3", "Invalid statement (at line 1, column 1)"),
        (None, "[Errno 2] No such file or directory: 'm.toml'"),
    ],
)
def test_no_toml(text: str | None, got: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("m.toml").write_text(text, encoding="utf-8")
    rows = "hardware_from('m.toml')", got, "a TOML file", "the file cannot be read as TOML", FIX
    check_message(lambda: hardware_from("m.toml"), ArgumentError, *rows)


def test_everything_at_once(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('like = "h100"\nmemory = 1\nefficiency = 2', encoding="utf-8")
    with pytest.raises(ArgumentError) as caught:
        hardware_from(tmp_path / "m.toml")
    assert len(caught.value.problems) == 2


def test_more_devices_than_are_connected() -> None:
    machine: Any = Hardware("ours", ((4, 1e12),), 1e12, 1e11, 1e10, (Link(8, 1e9, 1e-6),))
    check_message(
        lambda: machine.link(range(16)),
        PlacementError,
        "planning for ours",
        "devices 0 to 15 in one group",
        "at most 8 devices, which its outermost level connects",
        "no link is known that connects more",
        "a level of links more, with its bytes per second and its latency",
    )
