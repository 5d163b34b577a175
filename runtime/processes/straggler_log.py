"""Stragglers: processes that have not begun a call which this process began a minute ago.

Such a process may read data, save, compute something else, or hang. These cannot be told apart, so it is
named in a warning and goes on. A dead process is found by its heartbeats.
"""

import logging
import time
from dataclasses import dataclass, field

from sbp.compat.processes import KVStore
from sbp.runtime.processes.calls import Calls, published_history
from sbp.runtime.processes.messages import call_text

LOG = logging.getLogger("sbp")
SAID_AGAIN_SECONDS = 60.0


@dataclass
class StragglerLog:
    """How long this process has been in its last call or after it.

    Arguments:
      calls: its own.
      index: of this process.
      count: of all processes.
      call_number: the number of that call.
      since: when it was first seen, by the monotonic clock.
      times: how often a warning was logged.
    """

    calls: Calls
    index: int
    count: int
    call_number: int = 0
    since: float = field(default_factory=time.monotonic)
    times: int = 0

    def look(self, kv_store: KVStore, now: float) -> None:
        """Warns of stragglers once a minute: process 0 of all others, and the others of process 0.

        Arguments:
          now: by the monotonic clock, in seconds.
        """
        if self.calls.count != self.call_number:
            self.call_number, self.since, self.times = self.calls.count, now, 0
        if int((now - self.since) // SAID_AGAIN_SECONDS) <= self.times:
            return
        self.times += 1
        for other in [0] if self.index else range(1, self.count):
            theirs = published_history(kv_store, other).count
            if theirs < self.call_number:
                LOG.warning(
                    "process %d has begun call %d, %s, %.0f s ago; process %d has begun %d",
                    *(self.index, self.call_number, call_text(self.calls.latest), now - self.since),
                    *(other, theirs),
                )
