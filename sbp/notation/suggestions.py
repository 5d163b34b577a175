"""What a user meant by a value that is nearly a signature: a text, a class without a dim, a number, None."""

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from sbp.compat.untyped import Prefix
from sbp.errors import SignatureError
from sbp.signature import AUTO, Broadcast, Partial, Split, format_sbp, is_signature, parse_sbp

# A class that stands for a signature -> (why it is none, what to write in a list, what to write)
_CLASSES: dict[type, tuple[str, str, str]] = {
    Split: ("S alone does not say which dim is split", "S(0)", "S(0) for the first dim, S(1) for the next"),
    Broadcast: ("Broadcast is a class", "B", "B"),
    Partial: ("Partial is a class", "P", "P"),
}
_TEXT = "a text is no signature"
_HOLE = "None and AUTO are for a whole tensor, not for one axis of the placement"


def suggestion(x: Prefix) -> tuple[str, str] | None:
    """Why a value is no signature, and what to write; None for a signature, or if the meaning is unclear.

    >>> suggestion("S(1)"), suggestion(Split)[1]
    (('a text is no signature', 'S(1), without quotes'), 'S(0) for the first dim, S(1) for the next')
    >>> suggestion(["B", "S(1)"])
    ('a text is no signature', '[B, S(1)], without quotes')
    >>> suggestion([Split(0), None])
    ('None and AUTO are for a whole tensor, not for one axis of the placement', '[S(0), B]')
    """
    if type(x) in (list, tuple):
        return _meant_list(x)
    if isinstance(x, str):
        return _TEXT, _written(x) or f"PartitionSpec({x!r}), if it is the name of an axis"
    if isinstance(x, type) and issubclass(x, PartitionSpec):
        return "PartitionSpec alone names no axis", "PartitionSpec('data')"
    if isinstance(x, type) and x in _CLASSES:
        why, _, write = _CLASSES[x]
        return why, write
    if isinstance(x, int) and not isinstance(x, bool):
        return "a number does not say that the dim is split", f"S({x})"
    return None


def _written(text: str) -> str:
    """How to write the signature that a text means; "" if it means none."""
    try:
        nd = parse_sbp(text)
    except SignatureError:
        return ""
    one = len(nd) == 1 and not text.strip().startswith("[")
    return f"{nd[0] if one else format_sbp(nd)}, without quotes" if nd else ""


def _meant_list(entries: Sequence[object]) -> tuple[str, str] | None:
    holes = [e for e in entries if e is None or e is AUTO]
    odd = [e for e in entries if not is_signature(e) and e is not None and e is not AUTO]
    if len(holes) == len(entries) or not (odd or holes):
        return None  # a container of what the compiler chooses, or a signature
    texts = [e for e in odd if isinstance(e, str)]
    if texts and len(texts) + len(holes) == len(entries) and not all(map(_written, texts)):
        return _TEXT, f"PartitionSpec({', '.join(map(repr, entries))}), if these are names of axes"
    words, whys = list[str](), list[str]()
    for e in entries:
        found = suggestion(e) if e in odd else None
        if e in odd and (found is None or isinstance(e, list | tuple)):
            return None
        words.append(_word(e))
        whys += [found[0]] if found else [_HOLE] if e in holes else []
    quotes = ", without quotes" if texts else ""
    return "; ".join(dict.fromkeys(whys)), f"[{', '.join(words)}]{quotes}"


def _word(entry: object) -> str:
    """How to write one entry of a list."""
    if is_signature(entry):
        return repr(entry)
    if isinstance(entry, str):
        return _written(entry).partition(", without")[0] or repr(entry)
    if isinstance(entry, type):
        return _CLASSES[entry][1] if entry in _CLASSES else "B"
    return f"S({entry})" if isinstance(entry, int) else "B"
