"""The doctor processes of several hosts exchange JSON through torchrun's store. Every wait has a
time limit."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from torch.distributed import (
    DistError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from ddp_train.errors import PeerError
from ddp_train.text import first_line

Facts = dict[str, Any]


class Peers:
    """The doctor processes of all hosts of a job, one per host. Host 0 collects what the others
    send."""

    def __init__(self, store: Store, number: int, count: int, attempt: int) -> None:
        """number: of this host, 0 to count - 1.

        count: number of all hosts.
        attempt: number of torchrun's restarts.
        """
        self.store = PrefixStore(f"doctor/{attempt}", store)
        self.number = number
        self.count = count

    @property
    def is_leader(self) -> bool:
        return self.number == 0

    def gather(self, name: str, value: Facts, seconds: float) -> dict[int, Facts]:
        """Send a value to host 0. On host 0: the values of all hosts that sent one in time;
        elsewhere {}."""
        self.store.set(f"{name}/{self.number}", json.dumps(value))
        values: dict[int, Facts] = {}
        if not self.is_leader:
            return values
        deadline = time.monotonic() + seconds
        while True:
            for number in range(self.count):
                key = f"{name}/{number}"
                if number not in values and self.store.check([key]):
                    values[number] = json.loads(self.store.get(key))
            if len(values) == self.count or time.monotonic() > deadline:
                return dict(sorted(values.items()))
            time.sleep(0.02)

    def publish(self, name: str, value: Any) -> None:
        """Send a value to all hosts, from host 0."""
        self.store.set(name, json.dumps(value))

    def wait_for(self, name: str, seconds: float) -> Any:
        """The value that host 0 published. Raises PeerError if there is none in time."""
        self.store.set_timeout(timedelta(seconds=seconds))
        try:
            return json.loads(self.store.get(name))
        except DistError as error:
            raise PeerError(
                f"no message from host 0 for {seconds:.0f} s ({first_line(error)})",
                "check on host 0 whether the command still runs, and what it printed",
            ) from error

    def clock_offsets(self, others: list[int], seconds: float) -> dict[int, float]:
        """Seconds by which the clock of each host is ahead of that of host 0, which asks.

        Hosts without an answer are left out.

        All are asked at once. An answer that lies between the times of question and answer has
        offset 0.
        """
        offsets: dict[int, float] = {}
        deadline = time.monotonic() + seconds
        question_time = time.time()
        for number in others:
            self.store.set(f"clock/ask/{number}", "now")
        while len(offsets) < len(others) and time.monotonic() < deadline:
            for number in others:
                key = f"clock/{number}"
                if number not in offsets and self.store.check([key]):
                    clock = float(self.store.get(key))
                    offsets[number] = clock - min(max(clock, question_time), time.time())
            time.sleep(0.005)
        return offsets

    def answer_clock(self, seconds: float) -> None:
        """Wait for the question of host 0, and answer it. Raises PeerError if it does not come in
        time."""
        self.store.set_timeout(timedelta(seconds=seconds))
        try:
            self.store.get(f"clock/ask/{self.number}")
        except DistError as error:
            raise PeerError(
                f"host 0 did not ask for this host's clock ({first_line(error)})",
                "check on host 0 whether the command still runs",
            ) from error
        self.store.set(f"clock/{self.number}", str(time.time()))
