"""A real SLURM over network namespaces: slurmctld on node0, slurmd and munged on every host (see
tests/support/netlab.py).

    with SlurmLab(2, packages(), folder) as slurm:
        job = slurm.submit("deploy/slurm/train.sbatch", "train.epochs=3", options=["--nodes=2"])
        slurm.wait_for(job, "COMPLETED")

Debian's packages are unpacked into build/slurm, with what they need and this machine has not;
nothing is installed. The daemons live in the hosts and end with them. Nodes claim 256 cores, so
that they take several jobs for real ones; they have no GPUs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.commands import LIMIT_SECONDS, ROOT, environment, wait_until
from tests.support.netlab import Host, NetLab
from tests.support.netlab import why_not as why_no_hosts

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
UNPACKED = ROOT / "build" / "slurm"
CORES = 256
BEGIN_DELAY_SECONDS = 5
"""A job that went back into the queue waits until the credential of its last start has expired: 120
s by default."""
SOCKET = "/dev/shm/munge.socket"
"""Of munged. Each host has its own /dev/shm."""
LOOK_SECONDS = 0.4
"""Between two questions to slurmctld: each is a process."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")


class NoSlurmError(Exception):
    """Why SLURM cannot be had here."""


def why_not() -> str:
    """Why this machine cannot have a lab, or nothing; the packages may still be out of reach."""
    missing = [tool for tool in ("apt-get", "dpkg") if not shutil.which(tool)]
    return why_no_hosts() or (f"not installed: {', '.join(missing)}" if missing else "")


def packages() -> Path:
    """The folder into which Debian's packages are unpacked: fetched if they are not there, checked
    by apt as always.

    apt's lists and archives are kept apart, and nothing of the machine is changed. Raises
    NoSlurmError.
    """
    if UNPACKED.exists():
        return UNPACKED
    part = UNPACKED.with_name(f"slurm.{os.getpid()}")
    lists = part / "lists"
    archives = part / "archives"
    for folder in (lists, archives):
        (folder / "partial").mkdir(parents=True)
    apart = {
        "Dir::State::lists": lists,
        "Dir::Cache::archives": archives,
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Debug::NoLocking": "true",
        "APT::Sandbox::User": "root",
    }
    options = [word for name, value in apart.items() for word in ("-o", f"{name}={value}")]
    fetch = ["install", "--download-only", "--yes", "--no-install-recommends", *PACKAGES]
    try:
        for words in (["update"], fetch):
            _call(["apt-get", "-qq", *options, *words])
        for archive in archives.glob("*.deb"):
            _call(["dpkg", "-x", str(archive), str(part / "root")])
        (part / "root").rename(UNPACKED)
    finally:
        shutil.rmtree(part)
    return UNPACKED


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NoSlurmError(
            f"{' '.join(command[:1])} took longer than {error.timeout:g} s"
        ) from None
    if done.returncode:
        raise NoSlurmError(f"Debian's packages of SLURM are out of reach: {done.stderr.strip()}")


class SlurmLab:
    """A cluster of `count` nodes, node0 the head. `folder` holds its state, its logs and what its
    jobs write."""

    def __init__(self, count: int, unpacked: Path, folder: Path) -> None:
        self.count = count
        self.unpacked = unpacked
        self.folder = folder
        self.stack = contextlib.ExitStack()
        self.hosts: list[Host] = []
        libraries = next((unpacked / "usr/lib").glob("*-linux-gnu"))
        self.plugins = libraries / "slurm-wlm"
        tools = [str(unpacked / "usr" / name) for name in ("bin", "sbin")]
        self.env = environment(
            {
                "PATH": os.pathsep.join([*tools, os.environ["PATH"]]),
                "LD_LIBRARY_PATH": f"{libraries}:{self.plugins}",
                "SLURM_CONF": str(folder / "slurm.conf"),
            }
        )

    def __enter__(self) -> SlurmLab:
        with self.stack:  # undone if anything fails
            self._configure()
            self.hosts = self.stack.enter_context(NetLab(self.count)).hosts
            for host in self.hosts:
                self._daemon(
                    host,
                    "munged",
                    "--foreground",
                    "--force",
                    f"--key-file={self.folder / 'munge.key'}",
                    f"--socket={SOCKET}",
                    "--pid-file=/dev/shm/munge.pid",
                    "--log-file=/dev/shm/munge.log",
                    "--seed-file=/dev/shm/munge.seed",
                )
            for host in self.hosts:
                wait_until(
                    lambda host=host: Path(f"/proc/{host.init}/root{SOCKET}").exists(), "munged"
                )
            self._daemon(self.hosts[0], "slurmctld-wlm", "-D")
            for host in self.hosts:
                self.boot(host)
            wait_until(self._is_up, f"cluster; see {self.folder}")
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def boot(self, host: Host) -> None:
        """Starts slurmd on a host."""
        stepd = (
            self.unpacked / "usr/sbin/slurmstepd-wlm"
        )  # Debian names it slurmstepd when it installs it
        self._daemon(host, "slurmd-wlm", "-D", "-N", host.name, "-d", str(stepd))

    def submit(self, *words: str, options: list[str], env: dict[str, str] | None = None) -> str:
        """The number of a job: `sbatch options words` from the top of the repository; its log is
        job_NUMBER."""
        log = f"--output={self.folder}/job_%j"
        return self.call(
            "sbatch", "--parsable", log, "--gpus-per-node=0", *options, *words, env=env
        ).strip()

    def call(self, *command: str, env: dict[str, str] | None = None) -> str:
        """What a command on the head says."""
        with self.popen(
            *command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            out, err = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0, f"{' '.join(command)}: {err}"
        return out

    def popen(
        self, *command: str, env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command on the head, at the top of the repository."""
        return self.hosts[0].popen(list(command), ROOT, env={**self.env, **(env or {})}, **options)

    def show(self, job: str) -> dict[str, str]:
        """What slurmctld knows of a job: JobState, Restarts, ExitCode and so on."""
        words = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def wait_for(self, job: str, state: str) -> dict[str, str]:
        """Waits until a job is in a state, and out of its nodes. Returns what is known of it."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while (known := self.show(job))["JobState"] != state:
            assert known["JobState"] not in OVER and time.monotonic() < deadline, (
                f"{known}\n{self.said(job)}"
            )
            time.sleep(LOOK_SECONDS)
        return known

    def wait_while_alive(self, job: str, condition: Callable[[], bool], what: str) -> None:
        """Waits until something is so; a job that ended before has failed."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            known = self.show(job)
            assert known["JobState"] not in OVER, f"{known}\n{self.said(job)}"
            assert time.monotonic() < deadline, f"no {what} in {LIMIT_SECONDS} s\n{self.said(job)}"
            time.sleep(LOOK_SECONDS)

    def said(self, job: str) -> str:
        log = self.folder / f"job_{job}"
        return log.read_text() if log.exists() else ""

    def processes(self, words: str) -> list[str]:
        """The command lines, on all nodes, that contain some words."""
        return [line for host in self.hosts for line in host.commands() if words in line]

    def _is_up(self) -> bool:
        with self.popen(
            "sinfo", "--noheader", "--Node", "--format=%t", stdout=subprocess.PIPE, text=True
        ) as process:
            return (
                process.communicate(timeout=LIMIT_SECONDS)[0].split() == ["idle"] * self.count
            )  # or says it is not

    def _daemon(self, host: Host, *command: str) -> None:
        with (self.folder / f"{command[0]}.{host.name}").open("a") as log:
            process = host.popen(list(command), self.folder, env=self.env, stdout=log, stderr=log)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)

    def _configure(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        state = self.folder / "state"
        state.mkdir()
        nodes = f"node[0-{self.count - 1}]" if self.count > 1 else "node0"
        settings = {
            "ClusterName": "lab",
            "SlurmctldHost": "node0",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthInfo": f"socket={SOCKET},cred_expire={BEGIN_DELAY_SECONDS}",
            "PluginDir": self.plugins,
            "StateSaveLocation": state,
            "SlurmdSpoolDir": f"{self.folder}/spool.%n",
            "SlurmctldPidFile": f"{self.folder}/slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/slurmd.%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "MpiDefault": "none",
            "MailProg": "/bin/true",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",  # more cores than there are
            "SlurmdTimeout": 10,
            "ReturnToService": 2,
            "SchedulerParameters": (
                "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"
            ),
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [f"NodeName={nodes} CPUs={CORES}", f"PartitionName=main Nodes={nodes} Default=YES"]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # else slurmd looks for v2, and ends
