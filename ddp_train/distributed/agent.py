"""torchrun's agent, as its workers see it. Torch-free: they ask before they import torch."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from ddp_train.distributed.environment import has_agent_store
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from ddp_train.linux import end_with_parent


def end_with_agent(world: World) -> None:
    """Ends this worker with the agent that started it, whenever that dies; at once if it has died
    already."""
    end_with_parent()
    # No traceback per rank when torchrun passes Ctrl-C on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        check_agent_lives(world)
    except PeerError as error:
        print(f"FATAL peer (rank {world.rank}): {error}\n  remedy: {error.remedy}", file=sys.stderr)
        sys.exit(error.exit_code)


def check_agent_lives(world: World) -> None:
    """Raises PeerError if torchrun's agent has died.

    The agent listens before it starts workers: if its host answers that nobody does, it has died
    before they could ask to be ended with it, and torch would try to connect for as long as its
    store's timeout.
    """
    if not has_agent_store():
        return
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    for pause_seconds in (0, 0.3, 0.3):
        time.sleep(pause_seconds)
        if not _is_refused(address, port):
            return
    raise PeerError(
        f"rank {world.rank} cannot reach the store at {address}:{port}: nothing is listening on"
        " that port, so torchrun's agent, which served it, has ended",
        "see the output of torchrun, and start the same command again",
    )


def _is_refused(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
