"""Who may write into a folder of checkpoints: a lease, taken by one job and renewed while it runs.

A lease is a file `sbp_lease-<n>.json`; the one with the highest number holds, and a number is created by one
writer alone. Its owner counts its beats in the file. Others see that it lives by that count changing under
their own clock: clocks of hosts are never compared. An owner looks before each step that it finishes whether
its lease still holds, so that one that was taken for dead finishes nothing more.
"""

import contextlib
import functools
import json
import logging
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sbp.compat.forks import before_exit
from sbp.errors import CheckpointError, LeaseError
from sbp.runtime.storage import files, messages
from sbp.runtime.storage.files import Path

LOG = logging.getLogger("sbp")
_NAME = re.compile(r"sbp_lease-(\d+)\.json")
_LEFT = re.compile(r"\.(sbp_lease-(\d+)\.json)\..*")
BEAT_SECONDS = 5.0
DEAD_SECONDS = 30.0
"""Without a beat for so long, an owner is dead: six beats."""
WAIT_SECONDS = 60.0
"""After which who waits for a folder is refused."""
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, as its file says.

    Arguments:
      token: of this lease.
      job: its name; None where nothing names it.
      host, boot, pid, started: a process: the host's name and boot, its number there, and when it started
        in the clock ticks of that boot.
      path, inode: of the folder, as that process sees it.
      since: when the lease was taken, for people.
      beat: how often it was renewed.
      is_released: whether its owner has ended in good order.
    """

    token: str
    job: str | None
    host: str
    boot: str
    pid: int
    started: str
    path: str
    inode: int
    since: str
    beat: int = 0
    is_released: bool = False

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}, since {self.since}"


def own_holder(folder: Path, job: str | None) -> Holder:
    """This process, with a new token."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    token, pid = uuid.uuid4().hex, os.getpid()
    path, inode = os.fspath(folder), files.inode(folder)
    return Holder(token, job, platform.node(), _boot(), pid, _started(pid) or "", path, inode, since)


def is_gone(holder: Holder) -> bool:
    """Whether an owner was a process of this host and boot that has ended; False where nobody can tell."""
    if not holder.boot or holder.boot != _boot():
        return False
    return _started(holder.pid) != holder.started


def is_same(one: Holder, other: Holder) -> bool:
    """Whether two holders are one process."""
    return bool(one.boot) and (one.boot, one.pid, one.started) == (
        other.boot,
        other.pid,
        other.started,
    )


@dataclass
class Lease:
    """A lease of a folder, held by this process until it is released.

    Arguments:
      folder: of the checkpoints.
      number: of the lease.
      holder: this process.
      is_exclusive: whether the storage let only one writer take it.
      users: how many in this process share it.
      failed_saves: steps and folders of saves that failed: what was written there is deleted, but more may
        come.
    """

    folder: Path
    number: int
    holder: Holder
    is_exclusive: bool
    users: int = 1
    failed_saves: list[tuple[int, str]] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Sees whether the lease still holds.

        Raises:
          LeaseError: if another one has taken the folder.
        """
        last = _last(self.folder, self.number)
        if last is not None and (last[0] != self.number or last[1].token != self.holder.token):
            raise LeaseError(messages.lease_lost(self.folder, str(last[1])))

    def release(self) -> None:
        """Lets others have the folder at once; in a fork of its holder it does nothing."""
        if self.holder.pid != os.getpid():
            return
        self._end.set()
        with self._guard, contextlib.suppress(Exception):  # whatever a storage's client says
            self.check()
            _write(self.folder, self.number, replace(self.holder, is_released=True))

    def renew(self) -> None:
        """Counts a beat."""
        with self._guard:
            if not self._end.is_set():
                self.holder = replace(self.holder, beat=self.holder.beat + 1)
                _write(self.folder, self.number, self.holder)

    def keep_renewed(self) -> None:
        """Renews the lease until it is released; a storage that fails is asked again."""
        while not self._end.wait(BEAT_SECONDS):
            with contextlib.suppress(Exception):
                self.renew()


def acquire(folder: Path, job: str | None = None, first: Callable[[], None] | None = None) -> Lease:
    """The lease of a folder for this process, which may have it already; waits for a living owner.

    Anyone has it at once after an owner that was released, or has died on this host; the same job after an
    owner on another host. Who does not beat for `DEAD_SECONDS` is dead, too.

    Arguments:
      folder: that is there.
      job: the name of this job, equal when it is started again; None where it has none.
      first: what is done once it is taken, before anybody else in this process shares it.

    Raises:
      LeaseError: if another one lives and holds it for `WAIT_SECONDS`.
    """
    return _holdings().acquire(folder, job, first or (lambda: None))


def give_up(lease: Lease) -> None:
    """Releases the lease when the last of those that share it in this process has given it up."""
    _holdings().give_up(lease)


@dataclass
class _Holdings:
    """The leases of this process, by folder: all that save into one folder here share its lease."""

    held: dict[str, Lease] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self, folder: Path, job: str | None, first: Callable[[], None]) -> Lease:
        with self.guard:
            name = files.real_name(folder)
            lease = self.held.get(name)
            if lease is not None and lease.holder.pid == os.getpid():
                with contextlib.suppress(CheckpointError):
                    lease.check()
                    lease.users += 1
                    return lease
            lease = _taken(folder, own_holder(folder, job), {x.holder.token for x in self.held.values()})
            try:
                first()
            except BaseException:
                lease.release()
                raise
            self.held[name] = lease
            threading.Thread(target=lease.keep_renewed, name="sbp lease", daemon=True).start()
            return lease

    def give_up(self, lease: Lease) -> None:
        with self.guard:
            lease.users -= 1
            if lease.users == 0:
                self.held.pop(files.real_name(lease.folder), None)
                lease.release()

    def release_all(self) -> None:
        for lease in list(self.held.values()):
            lease.release()


@functools.cache
def _holdings() -> _Holdings:
    made = _Holdings()
    before_exit(made.release_all)
    return made


def _taken(folder: Path, holder: Holder, held: Collection[str]) -> Lease:
    """Takes the next number of a folder, as soon as it may.

    Arguments:
      held: the tokens of the leases of this process. Another one of it was left by a storage that failed.
    """
    began = time.monotonic()
    last_beat, beat_at, is_said = None, began, False
    while True:
        last = _last(folder)
        now = time.monotonic()
        if last is not None and (last[1].token, last[1].beat) != last_beat:
            last_beat, beat_at = (last[1].token, last[1].beat), now
        is_left = last is not None and is_same(last[1], holder) and last[1].token not in held
        reason = "" if last is None or is_left else _why_it_may(last[1], holder, now - beat_at)
        if reason is not None:
            number = 1 if last is None else last[0] + 1
            lease = _created(folder, number, holder)
            if lease is not None:
                if last is not None and reason:
                    LOG.warning("%s", messages.lease_taken_over(folder, str(last[1]), reason))
                return lease
        elif now - began >= WAIT_SECONDS and last is not None:
            raise LeaseError(messages.lease_held(folder, str(last[1]), WAIT_SECONDS))
        elif last is not None and not is_said:
            LOG.warning("%s", messages.lease_awaited(folder, str(last[1]), WAIT_SECONDS))
            is_said = True
        time.sleep(LOOK_SECONDS)


def _why_it_may(owner: Holder, holder: Holder, silent_seconds: float) -> str | None:
    """Why a lease may be taken, in words; "" where nobody needs to hear; None if it may not."""
    if owner.is_released:
        return ""
    if is_gone(owner):
        return "that process has ended"
    if owner.boot and owner.boot == holder.boot and owner.path != holder.path and owner.inode != holder.inode:
        return "this folder is a copy of that one's"
    if owner.job is not None and owner.job == holder.job and owner.boot != holder.boot:
        return "it is of the same job, which was started again"
    if silent_seconds >= DEAD_SECONDS:
        return f"it has not renewed its lease for {silent_seconds:.0f} s"
    return None


def _created(folder: Path, number: int, holder: Holder) -> Lease | None:
    """The lease of a number, if nobody else had it, or a higher one, first."""
    try:
        files.create(_path(folder, number), _encoded(holder))
    except FileExistsError:
        return None
    highest = _last(folder, number)
    if highest is None or highest[0] != number:
        files.remove(_path(folder, number))
        return None
    if highest[1].token != holder.token:
        return None
    is_exclusive = files.is_exclusive(_path(folder, number), _encoded(holder))
    if not is_exclusive:
        LOG.warning("%s", messages.lease_advisory(folder))
    # Where listings come late, the last lease is found by going on from one that is listed: that one stays.
    listed = [int(m[1]) for name in files.names(folder) if (m := _NAME.fullmatch(name))]
    for old in listed:
        if old < min(max(listed), number - 1):
            files.remove(_path(folder, old))
    for name in files.names(folder):  # of those that were killed meanwhile
        if (match := _LEFT.fullmatch(name)) and int(match[2]) < number:
            files.remove_temporaries(folder, re.escape(match[1]), b'{\n "token": "')
    return Lease(folder, number, holder, is_exclusive)


def _last(folder: Path, at_least: int = 0) -> tuple[int, Holder] | None:
    """The lease with the highest number; found even where a listing comes late."""
    number = max((*(int(m[1]) for name in files.names(folder) if (m := _NAME.fullmatch(name))), at_least))
    while files.exists(_path(folder, number + 1)):
        number += 1
    if number == 0:
        return None
    try:
        return number, _holder(json.loads(files.read(_path(folder, number))))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        # It is no lease of an owner that lives: that one would have written it again.
        return number, Holder("", None, "an unknown host", "", 0, "", "", 0, "an unknown time")


def _holder(content: Mapping[str, Any]) -> Holder:
    return Holder(**{name: content[name] for name in Holder.__dataclass_fields__})


def _path(folder: Path, number: int) -> Path:
    return folder / f"sbp_lease-{number:06d}.json"


def _encoded(holder: Holder) -> bytes:
    return json.dumps(asdict(holder), indent=1).encode()


def _write(folder: Path, number: int, holder: Holder) -> None:
    files.replace(_path(folder, number), _encoded(holder))


@functools.cache
def _boot() -> str:
    """What names the boot of this host, and the numbering of processes that this one sees."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process of this host has started, in ticks since the boot; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
