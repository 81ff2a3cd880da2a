"""Network namespaces as hosts, each with its own hostname, addresses, processes and power button.

    with NetLab(2) as lab:
        lab.hosts[0].popen(["torchrun", ...])   # sees the files of this machine
        lab.hosts[1].unplug()                   # its cable is out: nothing arrives, nothing leaves
        lab.hosts[1].power_off()                # everything on it dies, and nobody is told

All of it lives in processes: when they end, nothing is left behind. Needs root, iproute2 and
util-linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import zygote

TOOLS = ("ip", "unshare", "nsenter")


def why_not() -> str:
    """Why this machine cannot have a lab, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "true"], capture_output=True
    )
    if tried.returncode:
        return f"unshare fails: {tried.stderr.decode().strip()}"
    return ""


@dataclass
class Host:
    """A machine with one cable, `eth0`."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]
    """The process outside that keeps the namespaces; its child is process 1 of the host."""
    init: int
    switch: int
    port: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def popen(self, command: list[str], cwd: Path, **options: Any) -> subprocess.Popen[bytes]:
        """Starts a command on this host."""
        process = zygote.Command(command, host=self.init, cwd=cwd, **options)
        self.started.append(process)
        return process

    def unplug(self) -> None:
        """The cable is out. Both ends still believe in their connections."""
        _ip("link", "set", self.port, "down", through=self.switch)

    def plug(self) -> None:
        _ip("link", "set", self.port, "up", through=self.switch)

    def power_off(self, silent: bool = True) -> None:
        """Everything on it dies. Silent: as if the plug were pulled, no packet tells the others;
        else as in a crash."""
        if silent:
            self.unplug()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, 9)
        for (
            process
        ) in self.started:  # a namespace of processes ends when all of them were waited for
            process.wait()
        self.holder.wait()

    def has(self, pid: int) -> bool:
        """Whether a process runs on this host, its first one left out."""
        namespace = _link(f"/proc/{self.init}/ns/pid")
        return bool(namespace) and _link(f"/proc/{pid}/ns/pid") == namespace and pid != self.init

    def commands(self) -> list[str]:
        """The command lines of all processes on this host but its first. Empty if it is off."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended in between
                if self.has(int(folder.name)):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return [line for line in found if line]


class NetLab:
    """`count` hosts node0, node1, ... at 10.77.0.10, .11, ... on one switch, without a way out."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stack = contextlib.ExitStack()
        self.hosts: list[Host] = []

    def __enter__(self) -> NetLab:
        with self.stack:  # undone if anything fails
            self.hosts_file = (
                Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "hosts"
            )
            switch = self._start(["unshare", "--net", "sleep", "infinity"])
            _wait_for(lambda: _link(f"/proc/{switch.pid}/ns/net") != _link("/proc/self/ns/net"))
            _ip("link", "add", "sw", "type", "bridge", through=switch.pid)
            _ip("link", "set", "sw", "up", through=switch.pid)
            names = {f"node{number}": f"10.77.0.{10 + number}" for number in range(self.count)}
            self.hosts_file.write_text(
                "".join(f"{a} {n}\n" for n, a in {"localhost": "127.0.0.1", **names}.items())
            )
            for number, (name, address) in enumerate(names.items()):
                self.hosts.append(self._add(name, address, switch.pid, f"port{number}"))
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def _add(self, name: str, address: str, switch: int, port: str) -> Host:
        boot = (
            f"mount --bind {self.hosts_file} /etc/hosts && mount -t tmpfs tmpfs /dev/shm &&"
            f" hostname {name} && exec sleep infinity"
        )
        flags = [
            "--net",
            "--uts",
            "--ipc",
            "--pid",
            "--mount",
            "--fork",
            "--mount-proc",
            "--kill-child",
        ]
        holder = self._start(["unshare", *flags, "sh", "-c", boot])
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        _wait_for(lambda: bool(children.read_text().split()))
        init = int(children.read_text().split()[0])
        _wait_for(lambda: b"sleep" in Path(f"/proc/{init}/cmdline").read_bytes())
        _ip(
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(init),
            through=switch,
        )
        _ip("link", "set", port, "master", "sw", "up", through=switch)
        for words in (
            ["addr", "add", f"{address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            _ip(*words, through=init)
        return Host(name, address, holder, init, switch, port)


def _ip(*words: str, through: int) -> None:
    """`ip` in the network namespace of a process."""
    done = subprocess.run(
        ["nsenter", f"--target={through}", "-n", "ip", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:  # the process is gone
        return ""


def _wait_for(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the lab does not start"
        time.sleep(0.005)
