"""The file of a compiled program: what it was made for in plain JSON, then the program, which is code.

    magic | SHA-256, or HMAC, of all that follows | length of the header | header | program

Nothing of the program is looked at before it is clear who can have written it, and the checksum and every
word of the header are right.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax

from sbp.compat.untyped import JaxDevice
from sbp.errors import ExecutableError, Problem, raise_all
from sbp.runtime.cache import trust
from sbp.runtime.cache.cache_folder import host_cpu
from sbp.runtime.cache.plan_store import code_digest
from sbp.runtime.cache.trust import DIGEST_BYTES, NotTrustedError
from sbp.text.json_reader import json_of
from sbp.version import VERSION

MAGIC = b"sbp executable 1\n"
SIGNED = b"sbp executable 1, signed\n"
LENGTH = struct.Struct("<Q")
PACKAGES = ("jax", "jaxlib")
AGAIN = "compile it here: sbp.compile(...), and program.save_executable(...) again"
# What a header says that must be so here too: in words, and why.
MUST: Mapping[str, tuple[str, str]] = {
    "sbp": ("version of this library", "another version may place arrays and stages in another way"),
    "jax": ("version of JAX", "a compiled program is of the version that has compiled it"),
    "jaxlib": ("version of jaxlib", "a compiled program is of the version that has compiled it"),
    "backend": ("runtime and driver", "a compiled program is of the runtime that has compiled it"),
    "kind": ("kind of device", "code for one kind does not run on another"),
    "cpu": ("kind of CPU", "code for a CPU uses all that it can do"),
    "devices": ("devices", "which devices exchange data is a part of the program"),
    "processes": ("processes", "each has the programs of its own devices"),
}


def file_of(path: str | os.PathLike[str]) -> Path:
    """The file of this process: one of several has its number behind the name."""
    count = jax.process_count()
    return Path(f"{os.fspath(path)}.{jax.process_index()}of{count}" if count > 1 else path)


@functools.cache
def own_version() -> str:
    """The version of this library, to the last character of its code."""
    found = hashlib.sha256(code_digest().encode())
    for file in sorted(_runtime_files()):
        found.update(file.read_bytes())
    return f"{VERSION} ({found.hexdigest()[:12]})"


def _runtime_files() -> Iterator[Path]:
    yield from (f for f in Path(str(resources.files("sbp.runtime"))).rglob("*.py") if f.is_file())


def made_for(devices: Sequence[JaxDevice]) -> dict[str, Any]:
    """What a program on some devices is compiled for, as headers say it."""
    kinds = sorted({d.device_kind for d in devices})
    platforms = sorted({d.platform for d in devices})
    return {
        "sbp": own_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "platform": " and ".join(platforms),
        "backend": devices[0].client.platform_version if devices else "none",
        "kind": f"{len(devices)} of {' and '.join(kinds)}" if devices else "none",
        "cpu": host_cpu() if platforms == ["cpu"] else "any",
        "devices": [[d.id, d.process_index] for d in devices],
        "processes": f"process {jax.process_index()} of {jax.process_count()}",
    }


def devices_of(header: Mapping[str, Any]) -> list[JaxDevice]:
    """The devices here that a program was made for, as far as they are there."""
    try:
        found = {d.id: d for d in jax.devices(header.get("platform"))}
    except RuntimeError:  # no such platform
        return []
    return [found[i] for i, _ in header.get("devices", ()) if i in found]


def write(path: Path, header: Mapping[str, Any], program: bytes, key: bytes | None = None) -> None:
    """Writes a file; who reads meanwhile sees the one that was there.

    Arguments:
      key: to sign it with; None for a file that its user alone can read and write.

    Raises:
      ExecutableError: if it cannot be written; what was there still is.
    """
    head = json.dumps(header).encode()
    rest = LENGTH.pack(len(head)) + head + program
    magic = MAGIC if key is None else SIGNED
    try:
        trust.write_file(path, magic + trust.digest(key, rest) + rest, key)
    except OSError as e:
        raise _wrong("not written", path, _of_system(e)) from e


def read(path: Path, key: bytes | None = None) -> tuple[dict[str, Any], bytes]:
    """The header and the program of a file that is whole, and that may be run.

    Arguments:
      key: that it was signed with; None for a file that nobody else can have written.

    Raises:
      ExecutableError: if it cannot be read, is none, is damaged, or may be of somebody else.
    """
    try:
        data = trust.read_file(path, key)
    except OSError as e:
        raise _wrong("not read", path, _of_system(e)) from e
    except NotTrustedError as e:
        raise _wrong("not trusted", path, str(e)) from e
    magic, other = (MAGIC, SIGNED) if key is None else (SIGNED, MAGIC)
    if data.startswith(other):
        if key is None:
            raise _wrong("signed", path, "a file that was signed with a key, and no key")
        raise _wrong("without a signature", path, "a file that was not signed")
    if not data.startswith(magic):
        raise _wrong("no executable", path, f"a file that begins with {data[:12]!r}")
    digest, rest = data[len(magic) :][:DIGEST_BYTES], data[len(magic) + DIGEST_BYTES :]
    if not trust.is_digest(digest, key, rest):
        if key is None:
            raise _wrong("damaged", path, f"{len(data)} bytes with another checksum than they had")
        raise _wrong("another signature", path, "a file with another signature than this key gives")
    try:
        (length,) = LENGTH.unpack_from(rest)
        header = json_of(rest[LENGTH.size :][:length])
        if not isinstance(header, dict):
            raise ValueError(f"a {type(header).__name__} is no header")
    except (struct.error, ValueError) as e:
        raise _wrong(
            "no header", path, f"a header that cannot be read: {type(e).__name__}: {e!s:.200}"
        ) from e
    return header, rest[LENGTH.size + length :]


def check(path: Path, header: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Compares what a program was made for with what is here.

    Raises:
      ExecutableError: for all that differs, at once.
    """
    raise_all(
        _made_for_other(path, name, header.get(name), here[name])
        for name in MUST
        if header.get(name) != here[name]
    )


def _words(name: str, found: Any) -> str:
    """A word of a header, for the user."""
    if name == "devices" and isinstance(found, Sequence):
        return f"ids {', '.join(str(d[0]) for d in found)}"
    return str(found)


def _made_for_other(path: Path, name: str, found: Any, here: Any) -> Problem:
    what, why = MUST[name]
    got, legal = _words(name, found), _words(name, here)
    if got == legal:  # the same ids, of other processes
        got, legal = f"{found}", f"{here}"
    return Problem(
        "executable", f"load_executable({str(path)!r}): {what}", got, f"{legal}, as here", why, AGAIN
    )


LOADED = "load_executable({path!r})"
OPENED = "load_executable({path!r}, signing_key=...)"
SAVED = "a file of program.save_executable(...)"
# What can be wrong with a file: the call, what is legal, why, and what to try.
WRONG: Mapping[str, tuple[str, str, str, str]] = {
    "not written": (
        "save_executable({path!r})",
        "a file that can be written",
        "nothing was changed",
        "another path",
    ),
    "not read": (
        LOADED,
        f"{SAVED}, of each process its own",
        "there is nothing to be loaded",
        AGAIN,
    ),
    "not trusted": (
        LOADED,
        "a file of yours or of root that nobody else can write, in folders of the same kind up to /",
        "it is code: whoever can write or replace it can run anything as you",
        "chmod go-w, or a folder of your own; if several people write it, a shared key: "
        "sbp.Options(signing_key=...) when it is saved, load_executable(path, signing_key=...)",
    ),
    "signed": (
        LOADED,
        "the key of the Options(signing_key=...) that it was compiled with",
        "only the key says who has written it",
        "load_executable(path, signing_key=...)",
    ),
    "without a signature": (
        OPENED,
        "a file that was signed with this key",
        "anybody may have written it",
        "sbp.compile(..., options=sbp.Options(signing_key=...)), and program.save_executable(...) again",
    ),
    "another signature": (
        OPENED,
        "the file as it was written, and the key that it was signed with",
        "another key has signed it, or it was cut or changed since; it is code, so nothing of it was run",
        AGAIN,
    ),
    "no header": (
        LOADED,
        SAVED,
        "it does not say what it was compiled for, so nothing of it was run",
        AGAIN,
    ),
    "no executable": (
        LOADED,
        SAVED,
        "it has another beginning, and nothing else of it was looked at",
        "sbp.load_plan for plans, sbp.restore for checkpoints",
    ),
    "damaged": (
        LOADED,
        "the file as it was written",
        "it was cut, or changed; it is code, so nothing of it was run",
        AGAIN,
    ),
}


def _wrong(what: str, path: Path, got: str) -> ExecutableError:
    """The error for what is wrong with a file.

    Arguments:
      what: a key of `WRONG`.
    """
    call, legal, why, fix = WRONG[what]
    return ExecutableError(Problem("executable", call.format(path=str(path)), got, legal, why, fix))


def _of_system(error: OSError) -> str:
    return f"{type(error).__name__}: {error.strerror or error}"
