"""The other end of the processes of a history."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
PATIENCE_SECONDS = 120.0


class Refused(Exception):
    """What a process says in words: a CheckpointError."""


class Gone(Exception):
    """A process that was killed before it answered."""


class Server:
    """What starts the processes of a history.

    Arguments:
      folder: for its socket.
    """

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "socket")
        flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
        more = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.runtime.checkpoint.histories.server",
            self.path,
        ]
        environment = {**os.environ, **more}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{command} did not start")

    def started(self) -> Process:
        """A new process."""
        return Process(self.path)

    def close(self) -> None:
        """Ends the server; its processes end when nobody asks them any more."""
        self.process.communicate()


class Process:
    """A process of a history, which can be asked, killed, stopped and let go on."""

    def __init__(self, path: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(path)
        self.lines = self.connection.makefile("rw")
        self.pid = int(self._heard()["pid"])
        self.is_alive = True

    def begin(self, do: str, **arguments: Any) -> None:
        """Asks for something; `end` has the answer."""
        self.lines.write(json.dumps({"do": do, **arguments}) + "\n")
        self.lines.flush()

    def end(self) -> Any:
        """The answer.

        Raises:
          Refused: if it was refused in words.
          Gone: if the process is gone.
          AssertionError: if it was something else that was raised.
        """
        answer = self._heard()
        if "refused" in answer:
            raise Refused(answer["refused"])
        assert "raw" not in answer, f"a raw exception: {answer['raw']}"
        return answer["value"]

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to a command."""
        self.begin(do, **arguments)
        return self.end()

    def has_stopped(self) -> bool:
        """Whether the process has stopped, rather than answered."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            if select.select([self.connection], [], [], 0.005)[0]:
                return False
            with open(f"/proc/{self.pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "T":
                    return True
        raise AssertionError("neither stopped nor answered")

    def go_on(self) -> None:
        """Lets a stopped process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process at once; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Hangs up, which ends the process, and waits for its end."""
        with contextlib.suppress(OSError):
            self.lines.close()
        self.connection.close()
        self.is_alive = False
        end = time.monotonic() + PATIENCE_SECONDS
        while os.path.exists(f"/proc/{self.pid}") and time.monotonic() < end:
            time.sleep(0.001)

    def _heard(self) -> dict[str, Any]:
        self.connection.settimeout(PATIENCE_SECONDS)
        try:
            line = self.lines.readline()
        except ConnectionResetError:
            line = ""
        if not line:
            raise Gone
        return dict(json.loads(line))
