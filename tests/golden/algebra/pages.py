"""The pages of the algebra: for each family of rules, what its ops do to signatures and what that costs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

from sbp.rules import REGISTRY, Rule
from sbp.rules.registry import USER
from tests.golden.algebra.applications import NEWER, Application, chosen
from tests.golden.algebra.params import params_text
from tests.golden.algebra.words import (
    number_text,
    row_words,
    sent_bytes,
    share_text,
    signature_text,
    tensor_text,
    work,
    wrapped,
)
from tests.rules.claims import WITHOUT_SAMPLE

# Room for a signature beside its figures; words of longer ones start on a line of their own.
WIDEST = 30
# What stands in front of the names of ops that are not applied on a page.
NOT_APPLIED = "not applied"

HOW_TO_READ = """
Written by `python -m pytest tests/golden --update-golden` from the registry of rules and the samples in
tests/rules; what changes here, a rule has changed. A section has the ops of one rule and what it says of
itself. A block is an application: operands, results and the parameters that matter, on ONE axis of so many
devices, and what all of it takes without a split. Then every valid signature along the axis, in the
registry's order; the last is always "all whole".

  FLOPs, bytes  the share of the arithmetic and of the memory traffic that one device has.
  sends         bytes that one device sends inside the body of the op; what and why stands behind. `-`: none.
  waits for     the devices' results are parts: what it takes one device to reduce them, at once (all-reduce)
                or into shards (reduce-scatter, of maxima all-to-all). "passes": the operands were parts
                already; what reducing these instead would take.
  may be zeros  a whole operand can be made a part of the sum: it stays on one device, the others have zeros.
  bit for bit   results are elements of the operands, unchanged, whatever the parts are.
  multiplies    the parts of a sum are multiplied: an infinite factor gives NaN where the sum would not.
  parts must be finite, operands must be finite
                infinities, NaN and signs of zeros may come out otherwise than on one device.
  pads          "5 as 2+2+1+0 of 2": the shards have room for 2, and 2, 2, 1 and 0 rows of a dim of 5. Then
                what the body does with the rest: masks it; asks how long its shard is; takes or makes what
                belongs where the shard lies, placed by position; or leaves it as it is, because nothing that
                is used comes of it.
""".strip()


def families() -> list[str]:
    """The families of the registry, in its order."""
    return list(dict.fromkeys(r.family for r in REGISTRY.values() if r.family != USER))


def page(family: str) -> list[str]:
    """The blocks of a family's page; a blank line parts them."""
    title = (importlib.import_module(f"sbp.rules.{family}").__doc__ or family).strip().splitlines()[0]
    blocks = [f"# {title}", *HOW_TO_READ.split("\n\n")]
    for rules in sections(family):
        blocks += section(rules)
    return blocks


def sections(family: str) -> list[list[Rule]]:
    """The entries of a family; those that differ in their names only belong together."""
    found: dict[object, list[Rule]] = {}
    for r in REGISTRY.values():
        if r.family == family:
            key = r.rows, r.body, r.flops, r.traffic, r.communication, r.fused, r.functions, r.note
            found.setdefault(key, []).append(r)
    return list(found.values())


def section(rules: Sequence[Rule]) -> Iterator[str]:
    """What a rule says of itself, and its applications; equal ones of several ops stand once."""
    first = rules[0]
    yield "\n".join([*wrapped(f"## {', '.join(r.name for r in rules)}", "   "), *wrapped(_about(first))])
    together: dict[tuple[str, str], list[str]] = {}
    for one in chosen([r.name for r in rules]):
        name = one.op.name
        together.setdefault((name if name in NEWER else "", application(one)), []).append(name)
    for (_, text), names in together.items():
        what, _, rest = text.partition("\n")
        yield "\n".join([*wrapped(f"{', '.join(dict.fromkeys(names))}: {what}", "    "), rest])
    applied = {name for names in together.values() for name in names} | NEWER
    why: dict[str, list[str]] = {}
    for name in (r.name for r in rules if r.name not in applied):
        why.setdefault(WITHOUT_SAMPLE[name], []).append(name)
    for reason, names in why.items():
        yield "\n".join(wrapped(f"{NOT_APPLIED}: {', '.join(names)}: {reason}", "    "))


def _about(rule: Rule) -> str:
    says = " ".join((rule.rows.__doc__ or "").split())
    note = f"{rule.note[0].upper()}{rule.note[1:]}." if rule.note else ""
    body = "A body of its own runs on the shards." if rule.body else "The op itself runs on the shards."
    fused = "Most of its traffic goes when it is fused with its neighbours." if rule.fused else ""
    return " ".join(filter(None, (says, note, body, fused)))


def application(one: Application) -> str:
    """One application with all its rows; the first line is what it is applied to."""
    operands, results = (", ".join(map(tensor_text, xs)) or "nothing" for xs in (one.operands, one.results))
    flops, traffic = work(one)
    params = "; ".join([f"{operands} -> {results}", *params_text(one.op.name, one.op.params)])
    lines = [params, f"    over {one.group} devices; whole: {flops:.0f} FLOPs, {traffic:.0f} B of traffic"]
    if len(one.rows) == 1:
        lines.append("    no split and no parts: it runs whole on every device")
    return "\n".join([*lines, *table(one)])


def table(one: Application) -> Iterator[str]:
    """A line per row, or more where its words take them."""
    whole = work(one)
    signatures = [signature_text(row) for row in one.rows]
    room = min(max(map(len, [*signatures, "signature"])), WIDEST)
    yield f"    {'signature':<{room}}  {'FLOPs':>7}  {'bytes':>9}  {'sends':>7}"
    for row, text in zip(one.rows, signatures, strict=True):
        flops, traffic = (share_text(p, w) for p, w in zip(work(one, row), whole, strict=True))
        sent = sent_bytes(one, row)
        figures = f"{flops:>7}  {traffic:>9}  {f'{number_text(sent)} B' if sent else '-':>7}"
        words = "; ".join(row_words(one, row))
        if len(text) > room:
            yield from wrapped(f"    {text}", "        ")
            text = ""
        start = f"    {text:<{room}}  {figures}"
        yield from wrapped(f"{start}  {words}".rstrip(), " " * (len(start) + 2), keep=len(start) + 2)
