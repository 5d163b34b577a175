"""The launcher alone, with processes that are quick to start: they are Python, but join nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sbp.runtime.processes import launch as launcher
from sbp.runtime.processes.launch import SOON_SECONDS, LaunchRequest, Restarts, launch
from tests.runtime.processes.test_two_processes import ROOT

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Quick(LaunchRequest):
    """Processes of a script that is given its number, how many there are, and the pipe of the launcher."""

    def commands(self, processes: int, folder: Path, pipe: int, job: str) -> list[list[str]]:
        return [
            [sys.executable, "-c", self.argv[0], str(i), str(processes), str(pipe), job]
            for i in range(processes)
        ]


BEGIN = """
import os, signal, sys, time
from pathlib import Path
index, processes, pipe, job = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
"""


def run(
    code: str, processes: int = 2, restarts: int = 0, fewest: int = 0
) -> tuple[int, list[str], list[str]]:
    """What a launch returns, and what it has written to both streams."""
    out, err = list[str](), list[str]()
    what = Quick((BEGIN + code,), processes, restarts=restarts, min_processes=fewest)
    return launch(what, out.append, err.append), out, err


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits are short, and signals are those of a process that a person starts: a shell has processes in the
    background ignore some, and `nohup` does."""
    monkeypatch.setattr(launcher, "OTHERS_SECONDS", 2.0)
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr("sbp.runtime.processes.launch.FIRST_WAIT_SECONDS", 0.05)
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


COUNTED = """
file = Path({file!r})
if index == 0:
    with file.open("a") as opened: opened.write(f"{{processes}} {{job}}\\n")
time.sleep(0.3)
times = len(file.read_text().splitlines())
"""


def test_all_are_started_again_until_they_succeed(tmp_path: Path) -> None:
    file = tmp_path / "times"
    code = COUNTED.format(file=str(file)) + "if times < 3 and index == 1: os.kill(os.getpid(), 9)\n"
    code += "if index == 0 and times < 3: time.sleep(60)\n"
    returned, _, err = run(code, restarts=5)
    said = "process 1 of 2 was killed by SIGKILL"
    again = [f"restart {i} of 5: {said}; all 2 are started again in 0 s\n" for i in (1, 2)]
    assert returned == 0 and [line for line in err if line.startswith("restart")] == again
    names = {line.partition(" ")[2] for line in file.read_text().splitlines()}
    assert len(names) == 1 and names.pop().startswith("launch ")  # the lease of its folder stays its own


def test_no_more_often_than_was_said(tmp_path: Path) -> None:
    file = tmp_path / "times"
    returned, _, err = run(COUNTED.format(file=str(file)) + "sys.exit(7)\n", processes=1, restarts=2)
    assert returned == 1 and len(file.read_text().splitlines()) == 3
    assert err[-1] == "process 0 of 1 ended with code 7, after 2 restarts\n"


def test_with_fewer_where_the_same_one_fails_twice(tmp_path: Path) -> None:
    file = tmp_path / "times"
    code = COUNTED.format(file=str(file)) + "sys.exit(7 if index == 2 else 0)\n"
    returned, _, err = run(code, processes=3, restarts=5, fewest=2)
    assert returned == 0 and [line[0] for line in file.read_text().splitlines()] == ["3", "3", "2"]
    assert "twice in a row; 2 are started instead of 3 in 0 s" in err[-1]


def test_what_is_left_of_restarts() -> None:
    """A failure after a long time is not "in a row" with the one before; below the fewest it does not go."""
    begun = Restarts(5, 1, 2)
    once = begun.after(1, 1.0)
    assert once is not None and (once.processes, once.count, once.in_a_row) == (2, 1, 1)
    twice, other, late = once.after(1, 1.0), once.after(0, 1.0), once.after(1, SOON_SECONDS)
    assert twice is not None and (twice.processes, twice.count, twice.in_a_row) == (1, 2, 2)
    assert other is not None and other.processes == 2
    assert late is not None and (late.processes, late.in_a_row) == (2, 1)
    last = twice.after(0, 1.0)
    assert last is not None and (again := last.after(0, 1.0)) is not None and again.processes == 1
    assert Restarts(0, 1, 2).after(0, 1.0) is None


def test_a_process_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def commands(*args: object) -> list[list[str]]:
        return [[sys.executable, "-c", "import time; time.sleep(60)"], ["/no/such/program"]]

    monkeypatch.setattr(Quick, "commands", commands)
    returned, _, err = run("")
    assert returned == 1
    assert err[-1].startswith("process 1 of 2 cannot be started: [Errno 2] No such file or directory")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_who_was_asked_to_end_is_not_started_again(number: signal.Signals) -> None:
    """Every process hears it once, as SIGTERM, and may save; even its failure then is no reason to go on."""
    code = f"""
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("TERM"))
signal.signal(signal.SIGINT, lambda *_: heard.append("INT"))
if index == 1:
    time.sleep(0.3)
    os.kill(os.getppid(), {int(number)})
while not heard: time.sleep(0.01)
time.sleep(0.5)
print(heard, flush=True)
sys.exit(75)
"""
    returned, out, err = run(code, restarts=5)
    assert returned == 1 and sorted(out) == ["['TERM']\n", "[1] ['TERM']\n"]
    assert not [line for line in err if line.startswith("restart")]
    assert err[-1].endswith("ended with code 75; the launcher was asked to end\n")


def test_what_is_ignored_from_the_start_stays_ignored() -> None:
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run("os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.3)\n")[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_who_ends_well_when_asked_is_a_success() -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    code += "if index == 0: time.sleep(0.5); os.kill(os.getppid(), 15)\ntime.sleep(20)\n"
    assert run(code, restarts=5)[0] == 0


def test_the_second_signal_ends_all_at_once() -> None:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += "if index == 0:\n for _ in range(2): time.sleep(0.5); os.kill(os.getppid(), 15)\ntime.sleep(60)\n"
    returned, _, err = run(code, restarts=5)
    assert returned == 1
    assert err[-1] == "all 2 processes were ended at once: the launcher was asked to end twice\n"


def test_it_ends_while_it_waits_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbp.runtime.processes.launch.FIRST_WAIT_SECONDS", 30.0)
    code = "import subprocess\n"
    code += "if index == 0:\n"
    code += " late = f'sleep 1; kill -TERM {os.getppid()}'\n"
    code += " null = subprocess.DEVNULL\n"
    code += " subprocess.Popen(['sh', '-c', late], start_new_session=True, stdout=null, stderr=null)\n"
    code += "sys.exit(7)\n"
    returned, _, err = run(code, restarts=5)
    assert returned == 1
    assert "all 2 are started again in 30 s" in err[-2] and "the launcher was asked to end" in err[-1]


DEATHS: dict[str, tuple[str, str]] = {
    "raises, after those that have heard of it": (
        "time.sleep(0.8 if index == 1 else 0.3); sys.exit(1 if index == 1 else 3)",
        "process 1 of 3 ended with code 1\n",
    ),
    "ends without a word, before those that abort": (
        "time.sleep(0.1 * index)\nif index == 0: os._exit(7)\n"
        "sys.stderr.write('F1125 08:29:26.2 113 client.h:86] Terminating process because the JAX distributed "
        "service detected fatal errors.\\n*** Check failure stack trace: ***\\n')\n"
        "sys.stderr.write('    @ 0x7f  absl::x()\\n' * 50)\n"
        "sys.stderr.flush(); os.abort()",
        "process 0 of 3 ended with code 7\n",
    ),
    "ends with success, before those that follow": (
        "time.sleep(0.1 if index == 2 else 0.4); sys.exit(0 if index == 2 else 3)",
        "process 2 of 3 ended with code 0, while others still ran\n",
    ),
    "is stopped": (
        "if index == 1: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(0.5); sys.exit(3)",
        "process 1 of 3 was stopped, and did not answer\n",
    ),
    "is killed, and leaves a process behind that holds its streams": (
        "import subprocess\n"
        "if index == 1: subprocess.Popen(['sleep', '60']); time.sleep(0.2); os.kill(os.getpid(), 9)\n"
        "time.sleep(0.5); sys.exit(3)",
        "process 1 of 3 was killed by SIGKILL\n",
    ),
}


@pytest.mark.parametrize("name", DEATHS)
def test_the_last_line_names_the_culprit(name: str) -> None:
    code, said = DEATHS[name]
    returned, _, err = run(code, processes=3)
    assert returned == 1 and err[-1] == said
    assert not any("absl" in line for line in err)


def test_who_has_lost_another_one_is_shown_whole_where_nobody_else_is_to_blame() -> None:
    page = (
        "F1125 08:29:26.2 113 client.h:86] Terminating process because the JAX distributed service detected "
    )
    page += "fatal errors.\n    @ 0x7f  absl::x()\n"
    returned, _, err = run(f"sys.stderr.write({page!r}); sys.stderr.flush(); os.abort()\n", processes=1)
    assert returned == 1 and "".join(err[:2]) == page
    assert err[-1] == "process 0 of 1 has lost another process, and nothing says which\n"


LAUNCHER = """
import sys
from tests.runtime.processes.test_restarts import BEGIN, Quick
from sbp.runtime.processes.launch import launch
launch(Quick((BEGIN + sys.argv[1],), 4), lambda line: print(line, end="", flush=True), sys.stderr.write)
"""
ORPHANS = """
from sbp.runtime.processes.lifeline import end_with_launcher
import ctypes, subprocess
end_with_launcher(pipe)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"]) if index == 1 else None
print(os.getpid(), *([child.pid] if child else []), flush=True)
if index == 2: os.kill(os.getpid(), signal.SIGSTOP)
if index == 3: ctypes.PyDLL(None).usleep(60_000_000)  # no thread of Python runs meanwhile
time.sleep(60)
"""


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_when_the_launcher_is_killed_its_processes_end() -> None:
    """Also one that ignores SIGTERM, one that has started another one, one that is stopped, and one that
    holds Python's lock."""
    command = [sys.executable, "-c", LAUNCHER, ORPHANS]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    said = [started.stdout.readline().split() for _ in range(4)]
    pids = [int(word) for line in said for word in line if not word.startswith("[")]
    time.sleep(0.3)
    assert len(pids) == 5 and all(map(runs, pids))
    started.kill()
    while any(map(runs, pids)):  # or the test's own limit ends it
        time.sleep(0.01)
    started.communicate()


TERMINAL = """
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("TERM"))
signal.signal(signal.SIGINT, lambda *_: heard.append("INT"))
print("up", flush=True)
while not heard: time.sleep(0.01)
time.sleep(0.3)
print(heard, flush=True)
"""


def test_a_key_press_in_a_terminal_reaches_each_process_once() -> None:
    """Ctrl-C goes to all processes of a terminal: here the launcher alone has it, and hands it on."""
    terminal, end = os.openpty()
    command = ["setsid", "--ctty", sys.executable, "-c", LAUNCHER, TERMINAL]
    started = subprocess.Popen(command, cwd=ROOT, stdin=end, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert {started.stdout.readline().split()[-1] for _ in range(4)} == {"up"}
    os.write(terminal, b"\x03")
    out, _ = started.communicate()
    os.close(terminal), os.close(end)
    assert out.count("['TERM']") == 4 and "INT" not in out


def test_nobody_waits_for_who_reads_the_launcher() -> None:
    """`launch ... | head`: what comes later is read from the processes, and goes nowhere."""

    def closed(line: str) -> None:
        raise BrokenPipeError

    what = Quick((BEGIN + "print('x' * 200_000)\nprint('x', file=sys.stderr)\n",), 2)
    assert launch(what, closed, closed) == 0
