"""A user's own machine as a TOML file: `hardware_from` reads it, `hardware_text` writes it.

    like = "h100"                    # the catalogue's figures for whatever is left out below
    memory_bytes = "94GB"

    [[links]]                        # the innermost level: NVLink, with an H100's rate
    devices = 4

    [[links]]                        # the next level; as the last one it has no limit
    bytes_per_second = "400 Gb/s"

Without `like` the file must give all figures. `python -m sbp calibrate` writes such a file of a machine
that it measures.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbp.errors import raise_all
from sbp.hardware.catalogue import ANY, CATALOGUE, Hardware, Link
from sbp.hardware.toml_reader import (
    BYTES,
    FLOPS,
    RATE,
    SECONDS,
    Form,
    TomlReader,
    TomlTable,
    are_positive,
    are_rising,
    is_count,
    is_number,
    is_tables,
    is_text,
)
from sbp.rates.collectives import KINDS
from sbp.rates.tables import CollectiveCurve, rise_monotonically

ITEMS = {"float8": 1, "bfloat16": 2, "float32": 4, "float64": 8}
"""The types that matrix rates are given for, with the bytes of an element; other types go by their size."""
RATES = dict.fromkeys(ITEMS, FLOPS)
FIGURES = {
    "memory_bytes": BYTES,
    "memory_bytes_per_second": RATE,
    "vector_flops_per_second": FLOPS,
    "launch_seconds": SECONDS,
}
LINK = {"bytes_per_second": RATE, "latency_seconds": SECONDS}
PLATFORMS = ("gpu", "cpu", "tpu")
FORMS = {
    "name": Form(is_text, "a text", "plans print it", 'name = "our_h100"'),
    "efficiency": Form(
        lambda x: is_number(x) and 0 < x <= 1,
        "a number above 0, at most 1",
        "it is the share of their peak rate that large matrix products reach",
        "efficiency = 0.7",
    ),
    "merges_collectives": Form(
        lambda x: isinstance(x, bool),
        "true or false",
        "it says whether XLA merges small collectives by itself, as it does on GPUs",
        "merges_collectives = true",
    ),
}
NEEDED = (
    *("memory_bytes", "memory_bytes_per_second", "vector_flops_per_second"),
    *("matrix_flops_per_second", "links"),
)
KEYS = (*FORMS, "like", "platform", *FIGURES, "matrix_flops_per_second", "links", "collectives")
CURVE_NEEDED = ("kind", "devices", "bytes", "seconds")
EXAMPLES = {
    "memory_bytes": 'memory_bytes = "80GB"',
    "memory_bytes_per_second": 'memory_bytes_per_second = "3.35 TB/s"',
    "vector_flops_per_second": 'vector_flops_per_second = "67 TFLOP/s"',
    "bytes_per_second": 'bytes_per_second = "400 Gb/s"',
    "latency_seconds": 'latency_seconds = "10 us"',
    "matrix_flops_per_second": 'matrix_flops_per_second.bfloat16 = "989 TFLOP/s"',
    "links": '[[links]] with bytes_per_second = "400 Gb/s" and latency_seconds = "10 us"',
    "kind": 'kind = "all_reduce"',
    "devices": "devices = 8",
    "bytes": "bytes = [4096, 1048576]",
    "seconds": "seconds = [1.2e-5, 3.1e-5]",
}
UNKNOWN = "an estimate needs it, and there is no `like` to take it from"


def hardware_from(path: str | os.PathLike[str]) -> Hardware:
    """Reads a machine from a TOML file, for `Options(hardware=...)`.

    Figures are numbers in the unit that their key names, or texts with a unit, such as "400 Gb/s".

    Raises:
      ArgumentError: if the file cannot be read, or with a list of everything that is wrong in it.
    """
    reader = TomlReader(f"hardware_from({os.fspath(path)!r})", EXAMPLES)
    data = reader.load(path, "`python -m sbp calibrate --out machine.toml` writes one of this machine")
    reader.check_keys(data, KEYS)
    own = None
    if "like" in data:
        why = "it is the entry of the catalogue to start from"
        own = CATALOGUE[reader.one_of(data["like"], tuple(CATALOGUE), "like", why)]
    else:
        reader.has(data, NEEDED, UNKNOWN)
    given: dict[str, Any] = {"name": Path(path).stem, **reader.figures(data, FIGURES)}
    given |= {key: reader.value(data[key], form, key) for key, form in FORMS.items() if key in data}
    if "platform" in data:
        why = "it is the JAX platform of the device"
        given["platform"] = reader.one_of(data["platform"], PLATFORMS, "platform", why)
    given["flops_per_second"] = _rates(reader, data, own)
    given["links"] = _links(reader, data, own)
    given["curves"] = _curves(reader, data, own)
    raise_all(reader.problems)
    if own is not None:
        return Hardware(**{f: getattr(own, f) for f in Hardware.__slots__} | given)
    return Hardware(**{"merges_collectives": given.get("platform", "gpu") == "gpu"} | given)


def _rates(reader: TomlReader, data: TomlTable, own: Hardware | None) -> tuple[tuple[int, float], ...]:
    """Matrix rates by item size."""
    key = "matrix_flops_per_second"
    found = dict(own.flops_per_second) if own else {}
    if key not in data:
        return tuple(found.items())
    form = Form(
        lambda x: isinstance(x, dict) and bool(x),
        f"a table with some of {', '.join(ITEMS)}",
        "products are rated by the type of their operands",
        EXAMPLES[key],
    )
    table = reader.value(data[key], form, key) or {}
    reader.check_keys(table, tuple(ITEMS), key)
    found |= {ITEMS[name]: rate for name, rate in reader.figures(table, RATES, key).items()}
    return tuple(sorted(found.items()))


def _links(reader: TomlReader, data: TomlTable, own: Hardware | None) -> tuple[Link, ...]:
    """The levels of links; a level takes what it leaves out from the same level of `like`."""
    before = own.links if own else ()
    if "links" not in data:
        return before
    form = Form(
        lambda x: is_tables(x) and bool(x),
        "tables, one for each level",
        "links are given by level, from the innermost out",
        EXAMPLES["links"],
    )
    tables: Sequence[TomlTable] = reader.value(data["links"], form, "links") or []
    found: list[Link] = []
    for i, table in enumerate(tables):
        like = before[i] if i < len(before) else None
        inside = found[-1].devices if found else 1
        found.append(_link(reader, table, f"links[{i}]", like, inside, i == len(tables) - 1))
    return tuple(found)


def _link(reader: TomlReader, table: TomlTable, at: str, like: Link | None, inside: int, last: bool) -> Link:
    """One level of links; the level inside it connects `inside` devices."""
    reader.check_keys(table, ("devices", *LINK), at)
    if like is None:
        reader.has(table, tuple(LINK), UNKNOWN, at)
    if not last and (like is None or like.devices == ANY):
        reader.has(table, ("devices",), "there is a level around this one", at)
    figures = reader.figures(table, LINK, at)
    base = like or Link(inside, 1.0, 0.0)
    devices = ANY if last else base.devices
    if "devices" in table:
        form = Form(
            lambda n: is_count(n) and n % inside == 0,
            f"a multiple of {inside}" if inside > 1 else "a whole number of at least 1",
            "so many consecutive devices share this level, which is made of whole ones of the level inside",
            f"devices = {8 * inside}",
        )
        devices = reader.value(table["devices"], form, f"{at}.devices") or inside
    return Link(devices, *(figures.get(key, getattr(base, key)) for key in LINK))


def _curves(
    reader: TomlReader, data: TomlTable, own: Hardware | None
) -> tuple[tuple[str, CollectiveCurve], ...]:
    """Measured collectives."""
    if "collectives" not in data:
        return ()
    if own is not None and own.chip:
        why, fix = f"collectives of {own.name} go by what was measured on it", "leave out one of the two"
        reader.wrong("collectives", "curves of its own", f'none beside like = "{own.name}"', why, fix)
    form = Form(is_tables, "tables, one for each curve", "each is a collective by size", "[[collectives]]")
    tables: Sequence[TomlTable] = reader.value(data["collectives"], form, "collectives") or []
    found = (_curve(reader, table, f"collectives[{i}]") for i, table in enumerate(tables))
    return tuple(curve for curve in found if curve is not None)


def _curve(reader: TomlReader, table: TomlTable, at: str) -> tuple[str, CollectiveCurve] | None:
    """One collective over groups of one size; None if something is wrong."""
    reader.check_keys(table, (*CURVE_NEEDED, "groups"), at)
    if not reader.has(table, CURVE_NEEDED, "a curve is made of all of these", at):
        return None
    sizes = table["bytes"] if isinstance(table["bytes"], list) else []
    forms = {
        "devices": Form(
            lambda n: is_count(n) and n > 1,
            "a whole number of at least 2",
            "so many devices talk to each other",
            EXAMPLES["devices"],
        ),
        "groups": Form(is_count, "a whole number of at least 1", "so many groups ran at once", "groups = 1"),
        "bytes": Form(
            are_rising,
            "rising positive numbers",
            "each is the size of the whole tensor on one device: the output of an all-gather, else the input",
            EXAMPLES["bytes"],
        ),
        "seconds": Form(
            lambda x: are_positive(x) and len(x) == len(sizes),
            f"{len(sizes)} positive numbers",
            "each is how long the collective of that size takes",
            EXAMPLES["seconds"],
        ),
    }
    given = {"groups": 1, **table}
    kind = reader.one_of(table["kind"], KINDS, f"{at}.kind", "these are the collectives that plans have")
    ranks, groups, sizes_, seconds = (reader.value(given[k], f, f"{at}.{k}") for k, f in forms.items())
    if None in (ranks, groups, sizes_, seconds):
        return None
    return kind, CollectiveCurve(ranks, groups, tuple(sizes_), tuple(rise_monotonically(seconds)))


def hardware_text(hardware: Hardware, remarks: Mapping[str, str]) -> str:
    """The TOML text of a machine, without `like`; `hardware_from` reads it.

    Arguments:
      remarks: the comment above each key; "" stands for the first lines of the file, "end" for the last.
    """
    items = {size: name for name, size in ITEMS.items()}
    lines = _comment(remarks.get("", ""))
    for key in ("name", "platform", *FIGURES, "efficiency", "merges_collectives"):
        lines += [*_comment(remarks.get(key, "")), f"{key} = {_value(getattr(hardware, key))}"]
    lines += [
        "",
        *_comment(remarks.get("matrix_flops_per_second", "")),
        "[matrix_flops_per_second]",
        *(f"{items[size]} = {_value(rate)}" for size, rate in hardware.flops_per_second),
        *(["", *_comment(remarks.get("links", ""))] if hardware.links else []),
    ]
    for link in hardware.links:
        lines += [
            "[[links]]",
            *([f"devices = {link.devices}"] if link.devices != ANY else []),
            *(f"{key} = {_value(getattr(link, key))}" for key in LINK),
            "",
        ]
    lines += _comment(remarks.get("collectives", ""))
    for kind, c in hardware.curves:
        lines += ["[[collectives]]", f'kind = "{kind}"', f"devices = {c.ranks}", f"groups = {c.groups}"]
        lines += [f"bytes = {_value(c.sizes)}", f"seconds = {_value(c.seconds)}", ""]
    return "\n".join([*lines, *_comment(remarks.get("end", ""))]).rstrip() + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.split("\n")] if text else []


def _value(x: object) -> str:
    """A value in TOML; figures have four digits, as no measurement is more precise.

    >>> _value(123456789.0), _value("a"), _value(True), _value((1, 2.5e-6))
    ('1.235e+08', '"a"', 'true', '[1, 2.5e-06]')
    """
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, str):
        return '"' + x.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(x, tuple):
        return f"[{', '.join(map(_value, x))}]"
    return f"{x:.4g}" if isinstance(x, float) else str(x)
