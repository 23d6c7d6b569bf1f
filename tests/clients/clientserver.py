"""A real server with the default model, for clients as their users install them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from served import Served

MODEL = "smollm2-135m"
ABORTED = 'requests_finished_total{reason="abort"}'


class Clients(Served):
    """The server, and what it says about clients that left."""

    @property
    def base(self) -> str:
        return self.url + "/v1"

    def aborted(self) -> float:
        return self.metrics().get(ABORTED, 0.0)

    def expect_abort(self, before: float) -> None:
        """A client has left: its request ends, long before its text would."""
        end = time.monotonic() + 20
        while self.aborted() <= before:
            assert time.monotonic() < end, "the request of a client that left goes on"
            time.sleep(0.05)
        self.idle()
