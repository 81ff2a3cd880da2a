"""The probes of one host: started, watched, ended. And what the answers of all ranks mean. Does not import torch."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_train.config.schema import Config
from ddp_train.distributed.environment import LISTEN_SOCKET, probe_environment, worker_environment
from ddp_train.distributed.world import World
from ddp_train.doctor.aside import END_SECONDS
from ddp_train.doctor.findings import Finding, failure, ok, skipped, warning
from ddp_train.doctor.stages import (
    COMPUTE,
    CONNECT,
    DONE,
    EXCHANGE,
    IMPORT,
    MEASURED_SIZES,
    MEET,
    NEIGHBOURS,
    STAGES,
    WORDS_OF_A_SIZE,
    Spec,
)
from ddp_train.errors import HangError, LaunchError
from ddp_train.linux import end_with_parent, state_of
from ddp_train.resilience.failure_report import is_peer_error
from ddp_train.text import counted

PATIENCE_SECONDS = 20.0
"""The longest that probes may be silent while they exchange, unless launch.timeout_seconds is less. A healthy one takes
a second."""
START_SECONDS, START_SECONDS_OF_A_PROCESS = 60.0, 0.5
"""The longest to import torch and meet, to start a GPU and compute, and to connect: at first, and for each process.
2,048 took 1,047 s to open their groups before that was improved (arXiv:2402.15627, section 3.5)."""
ECHO_SECONDS = 3.0
"""From the end of a probe that failed to that of the others: they may say more."""
SLOWER = {"cpu": 2.0, "cuda": 1.15}
"""Times the fastest, from which on a rank is a straggler. Cores are shared with others, GPUs should not be."""
LINK_SHARE = 0.5
"""Of what the link carries. NCCL reached 70 to 90 % of NVLink with 256 MiB on H200s."""


@dataclass
class Answer:
    """How far one rank came, and what it found out."""

    rank: int
    host: str
    pid: int
    stage: str = IMPORT
    seconds: float = 0.0
    """Since it came to this stage."""
    stopped: bool = False
    """By a signal or a debugger."""
    code: int | None = None
    """Exit code; None if it had to be ended."""
    error: str = ""
    """The last line that it wrote to standard error."""
    results: dict[str, Any] = field(default_factory=dict)
    undead: str = ""
    """The kernel's letter for the state in which it goes on after SIGKILL: D, it waits for a device."""

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}"


def patience(config: Config, size: int, several: bool) -> dict[str, float]:
    """The seconds for which probes may be silent, by the stage in which they are.

    size: of the world; several: hosts, of which one may still compute while ours wait for it in `connect`.
    """
    timeout, start = config.launch.timeout_seconds, START_SECONDS + START_SECONDS_OF_A_PROCESS * size
    compute = min(start, timeout)
    slow = {IMPORT: start, MEET: start, COMPUTE: compute, CONNECT: compute * (2 if several else 1)}
    return dict.fromkeys(STAGES, min(PATIENCE_SECONDS, timeout)) | slow


def longest(limits: dict[str, float]) -> float:
    """Seconds from the start of probes to their end, at most. limits: `patience`."""
    argv = MEASURED_SIZES * WORDS_OF_A_SIZE  # one limit each, the stages have theirs
    return sum(limits.values()) + argv * limits[EXCHANGE] + ECHO_SECONDS + END_SECONDS


def probe_alone(config: Config, import_path: Path, more: dict[str, str] | None = None) -> list[Answer]:
    """Of a run on this host alone, in the environment that the launcher gives its workers. more: variables."""
    size, threads = int(config.launch.nproc_per_node), int(config.launch.threads_per_process)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        port, started = listener.getsockname()[1], []
        for rank in range(size):
            world = World(rank, size, rank, size)
            env = worker_environment(world, port, threads, import_path.absolute()) | (more or {})
            if world.is_leader:
                env[LISTEN_SOCKET] = str(listener.fileno())
            started.append((world, env))
        return _probe(config, started, "alone", (listener.fileno(),))


def probe_together(config: Config, leader: World, import_path: Path) -> list[Answer]:
    """Of this host's ranks among those of others, under torchrun. leader: the first rank of this host."""
    threads, started = int(config.launch.threads_per_process), []
    for local in range(leader.local_size):
        world = World(leader.rank + local, leader.size, local, leader.local_size, leader.attempt, leader.run_id)
        started.append((world, probe_environment(world, threads, import_path.absolute())))
    return _probe(config, started, f"attempt_{leader.attempt}", ())


def _probe(
    config: Config, started: list[tuple[World, dict[str, str]]], run_id: str, descriptors: tuple[int, ...]
) -> list[Answer]:
    """Starts one process for each world and environment, and waits for the end of all or of our patience."""
    size = started[0][0].size
    limits = patience(config, size, several=size > len(started))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running: list[_Running] = []
        stack.callback(_end, running)
        for world, env in started:
            # The probe itself waits longer than we do: it cannot say who is guilty, we can.
            spec = Spec(world.device(config.device), config.launch.backend, longest(limits), run_id)
            errors = Path(folder, f"{world.rank}")
            process = subprocess.Popen(
                spec.argv(), env=env, pass_fds=descriptors, stdout=subprocess.PIPE,
                stderr=stack.enter_context(errors.open("wb")), preexec_fn=end_with_parent, start_new_session=True,
            )  # fmt: skip
            running.append(_Running(process, Answer(world.rank, socket.gethostname(), process.pid), errors))
        _watch(running, limits)
        return [probe.answer for probe in running]


class _Running:
    """One probe."""

    def __init__(self, process: subprocess.Popen[bytes], answer: Answer, errors: Path) -> None:
        self.process, self.answer, self.errors = process, answer, errors
        self.since = time.monotonic()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # something else that a library printed
                said = json.loads(line)
                stage = said.pop("stage")
                self.answer.results |= said
                self.answer.stage, self.since = stage, time.monotonic()

    def note(self) -> None:
        """How it stands at this moment."""
        self.answer.code = self.process.poll()
        if self.answer.code is not None:
            self.listener.join(1.0)  # what it said last
            lines = self.errors.read_text(errors="replace").strip().splitlines() if self.answer.code else []
            self.answer.error = lines[-1].strip() if lines else ""
        self.answer.stopped = state_of(self.process.pid) in ("T", "t")
        self.answer.seconds = time.monotonic() - self.since

    def bury(self, deadline: float) -> None:
        """After SIGKILL. One that does not die by then (time.monotonic) is left behind, and its answer says so."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.answer.undead = state_of(self.process.pid)
            return  # who listens to it cannot be stopped either, and has locked its output
        self.listener.join(1.0)
        if self.process.stdout:
            self.process.stdout.close()


def _end(running: list[_Running]) -> None:
    """SIGKILL: a stopped process obeys it too."""
    for probe in running:
        probe.process.kill()
    deadline = time.monotonic() + END_SECONDS
    for probe in running:
        probe.bury(deadline)


def _watch(running: list[_Running], limits: dict[str, float]) -> None:
    """Returns when all have ended, one has failed, or nobody has said anything for too long. limits: `patience`."""
    failed_at: float | None = None
    while True:
        for probe in running:
            probe.note()
        answers = [probe.answer for probe in running]
        codes = [answer.code for answer in answers]
        if None not in codes:
            return
        now = time.monotonic()
        if any(codes):
            failed_at = failed_at or now
            if now - failed_at > ECHO_SECONDS:
                return
        stopped = [answer for answer in answers if answer.stopped and answer.seconds > limits[EXCHANGE]]
        quiet = min(answer.seconds for answer in answers)  # since anybody has said anything
        if stopped or quiet > max(limits[answer.stage] for answer in answers if answer.code is None):
            return
        time.sleep(0.05)


# --- what the answers mean ------------------------------------------------------------------------------------------


def exchanged(answers: list[Answer], backend: str, without_peer_access: list[Answer] | None = None) -> Finding:
    """Whether every process could send to the others, in time and unspoilt.

    without_peer_access: answers of a second try with NCCL_P2P_DISABLE=1, if there was one.
    """
    check = "exchange"
    broken = [answer for answer in answers if answer.stage != DONE or answer.code != 0]
    if broken:
        return _stuck(answers, backend, without_peer_access)
    if len(answers) == 1:
        return skipped(check, "one process has nobody to exchange with")
    found = [answer.results["exchange"] for answer in answers]
    wrong = [pair for result in found for pair in result["wrong"]]
    if wrong or not all(result["summed"] for result in found):
        pairs = ", ".join(f"from {sender} to {receiver}" for sender, receiver in wrong) or "in the all-reduce"
        return failure(
            check,
            f"numbers arrive changed: {pairs} (ranks)",
            "try NCCL_P2P_DISABLE=1: if it helps, switch off IOMMU and ACS for the GPUs (NCCL user guide, "
            "Troubleshooting); if not, test memory and cables",
            wrong=wrong,
        )
    blind = [
        (answer.rank, other) for answer in answers for other in answer.results["compute"].get("no_peer_access", [])
    ]
    if backend == "nccl" and blind:
        pairs = ", ".join(f"rank {rank} to GPU {other}" for rank, other in blind)
        return warning(
            check,
            f"no peer access: {pairs}; NCCL goes through host memory",
            "`nvidia-smi topo -p2p r` shows why; consumer GPUs have none",
        )
    return ok(check, f"{counted(len(answers), 'process')} over {backend}, up to {NEIGHBOURS} neighbours each")


def _stuck(answers: list[Answer], backend: str, without_peer_access: list[Answer] | None) -> Finding:
    """Who kept the others waiting: one that is stopped, one that died, or those that are behind."""
    check = "exchange"
    undead = [answer for answer in answers if answer.undead]
    if undead:
        said = " and ".join(
            f"{answer.who} (process {answer.pid}) does not die (state {answer.undead}), in '{answer.stage}'"
            for answer in undead
        )
        remedy = "it waits in the kernel: `cat /proc/PID/stack`, `dmesg`; if that is the GPU's driver, reboot the host"
        return failure(check, said, remedy, HangError.exit_code)
    stopped = [answer for answer in answers if answer.stopped]
    if stopped:
        said = " and ".join(
            f"{answer.who} (process {answer.pid}) is stopped, in '{answer.stage}'" for answer in stopped
        )
        remedy = "who stops processes there: a debugger, a batch system, a frozen container?"
        return failure(check, said, remedy, HangError.exit_code)
    died = [answer for answer in answers if answer.code]
    if died:
        first = next((a for a in died if not is_peer_error(RuntimeError(a.error))), died[0])
        left = f"signal {-(first.code or 0)}" if (first.code or 0) < 0 else f"exit code {first.code}"
        said = f"{first.who} died in '{first.stage}' ({left}): {first.error or 'without a word'}"
        remedy = "see that message; `dmesg` tells whether the kernel ended it"
        return failure(check, said, remedy, LaunchError.exit_code)
    behind = min(STAGES.index(answer.stage) for answer in answers)
    guilty = [answer for answer in answers if STAGES.index(answer.stage) == behind]
    stage, seconds = STAGES[behind], min(answer.seconds for answer in guilty)
    names = "all processes stand" if len(guilty) == len(answers) else " and ".join(a.who for a in guilty) + " stands"
    said = f"{names} in '{stage}' for {seconds:.0f} s"
    code = HangError.exit_code
    if stage in (IMPORT, MEET):
        return failure(check, said, "look at the load and the disk of that host", code)
    if without_peer_access and all(answer.stage == DONE for answer in without_peer_access):
        return failure(
            check,
            f"{said}; with NCCL_P2P_DISABLE=1 it works: the GPUs' peer access is broken",
            "switch off IOMMU and ACS for the GPUs (NCCL user guide, Troubleshooting); until then export "
            "NCCL_P2P_DISABLE=1",
            code,
        )
    remedies = {
        "gloo": "look at the firewall between the hosts (all ports of net.ipv4.ip_local_port_range), and at "
        "GLOO_SOCKET_IFNAME",
        "nccl": "NCCL_DEBUG=INFO says which way it takes; try NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, "
        "NCCL_IB_DISABLE=1 one by one, and name the network with NCCL_SOCKET_IFNAME",
    }
    return failure(check, said, remedies[backend], code)


def hangs_in_nccl(answers: list[Answer], backend: str) -> bool:
    """Whether it is worth while to try again without peer access between GPUs."""
    stuck = [answer for answer in answers if answer.code is None]
    return (
        backend == "nccl"
        and any(a.stage in (CONNECT, EXCHANGE) for a in stuck)
        and not any(answer.stopped or answer.code for answer in answers)
    )


def bandwidth(answers: list[Answer], link: tuple[float, str]) -> Finding:
    """All-reduce over sizes, as bus bandwidth: what it would be on each link of a ring (nccl-tests, PERFORMANCE.md).

    link: bytes per second in one direction of the slowest link between them, 0 if unknown, and its name.
    """
    check, size = "all-reduce", len(answers)
    if size == 1:
        return skipped(check, "one process")
    if any("all_reduce" not in answer.results for answer in answers):
        return skipped(check, "the processes did not get so far: see exchange")
    measured = [{**row, "bus_bytes_per_second": 2 * (size - 1) / size * row["bytes"] / row["seconds"]}
                for row in answers[0].results["all_reduce"]]  # fmt: skip
    best = max(row["bus_bytes_per_second"] for row in measured)
    said = ", ".join(f"{row['bytes'] / 2**20:g} MiB {row['bus_bytes_per_second'] / 1e9:.3g} GB/s" for row in measured)
    capacity, name = link
    numbers = {"sizes": measured, "link_bytes_per_second": capacity}
    if not capacity:
        return ok(check, f"{said}; what {name} carries is not known" if name else said, **numbers)
    said += f"; {best / capacity:.0%} of {capacity / 1e9:.3g} GB/s ({name})"
    if best < LINK_SHARE * capacity:
        remedy = "NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME, says which way it takes: another interface, no GPUDirect?"
        return warning(check, said, remedy, **numbers)
    return ok(check, said, **numbers)


def stragglers(answers: list[Answer]) -> Finding:
    """The same product of matrices on all ranks at the same time: all wait for the slowest in every step."""
    check = "stragglers"
    computed = {answer.who: answer.results["compute"] for answer in answers if "compute" in answer.results}
    if len(computed) < 2:
        return skipped(check, "one process" if len(answers) == 1 else "the processes did not get so far: see exchange")
    seconds = {who: result["seconds"] for who, result in computed.items()}
    fastest = min(seconds.values())
    limit = SLOWER["cpu" if any(result["name"] == "cpu" for result in computed.values()) else "cuda"]
    slow = [f"{who} takes {time / fastest:.2f} times as long as the fastest"
            for who, time in seconds.items() if time > limit * fastest]  # fmt: skip
    if slow:
        remedy = "look at clocks, temperature, and what else runs there; leave it out until it is repaired"
        return warning(check, "; ".join(slow), remedy, seconds=seconds)
    return ok(check, f"the slowest takes {max(seconds.values()) / fastest:.2f} times as long as the fastest",
              seconds=seconds)  # fmt: skip


def torch_on(answers: list[Answer], config: Config, driver_cuda: tuple[int, int] | None) -> Finding:
    """Of one host: whether this torch can use these GPUs. driver_cuda: the newest CUDA of the driver, None without."""
    check, told = "torch", [answer for answer in answers if "versions" in answer.results]
    if not told:
        died = [answer for answer in answers if answer.code]
        if not died:
            return skipped(check, "no process got so far: see exchange")
        said = f"{died[0].who} could not import what it needs: {died[0].error or 'without a word'}"
        return failure(check, said, "set up the environment again (make train)", LaunchError.exit_code)
    results = told[0].results
    versions = results["versions"]
    said = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "cuda", "nccl"))
    if config.device == "cpu" or results["cuda_available"]:
        return ok(check, said, **versions)
    if results["torch_cuda"] is None:
        return failure(check, f"{said}: this torch was built without CUDA", "install the build for CUDA")
    newest = ".".join(map(str, driver_cuda or ())) or "none"
    return failure(
        check,
        f"{said}: torch finds no GPU that it can use; the driver supports CUDA up to {newest}",
        "update the driver, or install a torch for an older CUDA",
    )


def loads(answers: list[Answer]) -> dict[str, dict[str, Any]]:
    """What the driver said about each GPU under load, by rank."""
    return {answer.who: answer.results["compute"].get("load", {}) for answer in answers if "compute" in answer.results}
