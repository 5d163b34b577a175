"""A folder as histories look at it, without the library: what it holds, what is others', how it is harmed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.runtime.checkpoint.histories.model import ARRAYS, MANIFEST, Content

OURS = re.compile(r"sbp_manifest(\.abandoned-\w+)?\.json|data-[0-9a-f]{32}")
FOREIGN_STEP = 9
"""A step whose folder is somebody else's."""


@dataclass
class Look:
    """What lies in a folder.

    Arguments:
      finished: by step the tag that its manifest names; None where that is unreadable.
      abandoned: the tags of what was set aside, where they can be read.
      refused: steps whose folders hold something of others, and nothing of ours.
    """

    finished: dict[int, int | None] = field(default_factory=dict)
    abandoned: list[int] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)

    def differs(self, content: Content) -> str:
        """How it differs from what a model says; "" if it does not."""
        if self.finished.keys() != content.finished.keys():
            return f"steps {sorted(self.finished)}, not {sorted(content.finished)}"
        for step, version in content.finished.items():
            if self.finished[step] != (version.tag if version.harm != MANIFEST else None):
                return f"step {step} is of save {self.finished[step]}, not {version.tag}"
        aside = sorted(v.tag for v in content.listed)
        return (
            "" if sorted(self.abandoned) == aside else f"set aside are {sorted(self.abandoned)}, not {aside}"
        )


def look(folder: Path) -> Look:
    """Reads the manifests of a folder."""
    found = Look()
    for path in sorted(folder.glob("step_*")):
        if not re.fullmatch(r"step_\d{8}", path.name):
            continue
        step, names = int(path.name[5:]), [x.name for x in path.iterdir()]
        if names and not any(OURS.fullmatch(name) for name in names):
            found.refused.add(step)
        for name in names:
            if name == "sbp_manifest.json":
                found.finished[step] = _tag(path / name)
            elif name.startswith("sbp_manifest.abandoned-") and (tag := _tag(path / name)) is not None:
                found.abandoned.append(tag)
    return found


def _tag(path: Path) -> int | None:
    """The tag in a manifest whose checksum is right."""
    try:
        content = json.loads(path.read_bytes())
        said = content.pop("sha256")
        text = json.dumps(content, sort_keys=True)
        return int(content["extra"]["tag"]) if hashlib.sha256(text.encode()).hexdigest() == said else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


# -- what is others'


@dataclass
class Foreign:
    """Files in a folder that this library has not written, and their digests.

    Arguments:
      folder: of the checkpoints.
    """

    folder: Path
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, source: Path | str) -> None:
        """Adds a file with a text, or a copy of a folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, str):
            path.write_text(source)
        else:
            shutil.copytree(source, path)
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        self.digests |= {os.fspath(p.relative_to(self.folder)): _digest(p) for p in files}

    def is_in(self, step: int) -> bool:
        """Whether something of others is in the folder of a step: it is refused, if nothing of ours is."""
        return any(name.startswith(f"step_{step:08d}/") for name in self.digests)

    def changed(self) -> list[str]:
        """The files that are not as they were."""
        return [name for name, old in self.digests.items() if _digest(self.folder / name) != old]

    def leftovers(self, content: Content) -> list[str]:
        """Files and folders that belong to nobody: neither foreign, nor of a step that is there."""
        steps = {*content.finished, *(v.step for v in content.abandoned)}
        named = re.compile(
            "|".join([r"sbp_lease-\d{6}\.json", r"sbp_steps\.json", *(f"step_{s:08d}" for s in steps)])
        )
        tops = {name.split("/")[0] for name in self.digests}
        found = [p.name for p in self.folder.iterdir() if not named.fullmatch(p.name) and p.name not in tops]
        for step in steps:
            path = self.folder / f"step_{step:08d}"
            manifests = [
                p for p in path.iterdir() if p.name.startswith("sbp_manifest") and _tag(p) is not None
            ]
            known = {json.loads(p.read_bytes())["data"] for p in manifests}
            known |= {p.name for p in path.iterdir() if OURS.fullmatch(p.name) and "manifest" in p.name}
            known |= {n.split("/")[1] for n in self.digests if n.startswith(path.name)}
            if len(manifests) == len([p for p in path.iterdir() if p.name.startswith("sbp_manifest")]):
                found += [f"{path.name}/{p.name}" for p in path.iterdir() if p.name not in known]
        return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "not there"


# -- what is done to it


def cut(path: Path, rng: random.Random) -> None:
    """Takes the end of a file away, or all of it."""
    size = path.stat().st_size
    os.truncate(path, rng.choice([0, size // 2, max(size - 1, 0)]))


def flip(path: Path, rng: random.Random) -> None:
    """Flips a bit of a file."""
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))


def remove(path: Path, rng: random.Random) -> None:
    """Removes a file."""
    path.unlink()


def harmed(folder: Path, step: int, rng: random.Random) -> tuple[str, str]:
    """Harms a file of a step; what was done in words, and which part it was: "gone" for the whole step."""
    path = folder / f"step_{step:08d}"
    manifest = path / "sbp_manifest.json"
    data = _data_of(manifest)
    files = sorted(p for p in (path / data).rglob("*") if p.is_file()) if data else []
    file = manifest if not files or rng.random() < 0.2 else rng.choice(files)
    others = [
        d / "arrays" for d in folder.glob("step_*/data-*") if d.name != data and (d / "arrays").exists()
    ]
    if data and others and rng.random() < 0.3:
        shutil.rmtree(path / data / "arrays")
        shutil.copytree(rng.choice(sorted(others)), path / data / "arrays")
        return "has the arrays of another save", ARRAYS
    how = rng.choice([cut, flip, remove])
    how(file, rng)
    said = f"{how.__name__} {file.relative_to(path)}"
    if file != manifest:
        return said, ARRAYS
    return said, "gone" if how is remove else MANIFEST


def _data_of(manifest: Path) -> str:
    try:
        return str(json.loads(manifest.read_bytes())["data"])
    except (ValueError, KeyError, TypeError):
        return ""


@dataclass
class Disk:
    """A small disk of its own, in memory, which can be full.

    Arguments:
      path: where it is mounted.
    """

    path: Path

    @staticmethod
    def mounted(path: Path) -> Disk | None:
        """A disk of 4 MB; None where mounts are not allowed."""
        path.mkdir()
        run = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], capture_output=True)
        return Disk(path) if run.returncode == 0 else None

    def fill(self, left_bytes: int) -> None:
        """Fills it, but for some bytes."""
        about = os.statvfs(self.path)
        free = max(about.f_bavail * about.f_frsize - left_bytes, 0)
        (self.path / "filling").write_bytes(bytes(free))

    def free(self) -> None:
        """Takes that away again."""
        (self.path / "filling").unlink(missing_ok=True)

    def unmount(self) -> None:
        """Takes it away with all that it holds."""
        subprocess.run(["umount", "-l", self.path], capture_output=True, check=False)
