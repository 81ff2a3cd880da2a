"""`mode=doctor`: all checks in their order, on this host alone or on each of several under torchrun."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_train.config.schema import Config
from ddp_train.distributed.environment import (
    gloo_interface,
    host_number,
    hosts_started,
    visible_devices,
    write_reported,
)
from ddp_train.distributed.world import World
from ddp_train.doctor import gpu, probes
from ddp_train.doctor.aside import Aside, StuckError
from ddp_train.doctor.findings import REPORT_SECONDS, Finding, broken, examined, found_aside, on_host, report, skipped
from ddp_train.doctor.host import data_digest, host_findings, link_bytes_per_second
from ddp_train.errors import PeerError
from ddp_train.launcher.multihost import addresses_of_interfaces

if TYPE_CHECKING:  # torch is imported where there are other hosts to talk to
    from ddp_train.distributed.process_group import Store
    from ddp_train.doctor.peers import Peers

LOOK_SECONDS = 30.0
"""For the checks of a host before anything runs on it, which go on at the same time."""
VERSIONS_SECONDS = 15.0
"""For those of torch, CUDA, NCCL and this package's source."""
FACTS_SECONDS = 90.0
"""From the start until host 0 has heard what all hosts found at rest."""
CLOCK_SECONDS = 10.0
"""For the question of the time, which all are asked at once."""
SHARED_SECONDS = 15.0
"""For host 0 to write what the others must see, and to remove it; `seen_here` waits for 10 s."""
MARGIN_SECONDS = 30.0
"""By which the others wait longer for host 0 than it waits for them."""
TOKEN = "ddp_train doctor"
"""What host 0 writes into run_dir for the others to see."""
Facts = dict[str, Any]


def examine_here(config: Config, import_path: Path) -> int:
    """This host alone. Returns the exit code.

    import_path: the folder from which the probes import this package.
    """
    began, host, backend = time.monotonic(), socket.gethostname(), config.launch.backend
    found, findings = at_rest(config, several=False, under_torchrun=False)
    answers = probes.probe_alone(config, import_path)
    again = None
    if probes.hangs_in_nccl(answers, backend):
        again = probes.probe_alone(config, import_path, {"NCCL_P2P_DISABLE": "1"})
    findings.append(examined("torch", probes.torch_on, answers, config, found.cuda if found else None))
    findings += of_probes(answers, backend, link_between(config, found, None), again)
    findings.append(skipped("other hosts", "one host"))
    return report(on_host(host, findings), [host], Path(str(config.run_dir)), began)


def examine_together(store: Store, world: World, argv: list[str], config: Config, import_path: Path) -> int:
    """This process of torchrun. The first one of each host is its doctor, the others wait for what host 0 says.

    words: the command line. Returns the exit code, the same on all.
    """
    from ddp_train.distributed.preflight import acknowledge
    from ddp_train.doctor.peers import Peers

    peers = Peers(store, host_number(world), hosts_started(world), world.attempt)
    limit = longest(config, world) + MARGIN_SECONDS
    if not world.is_leader:
        _give_up_after(limit)
    try:
        if not world.is_local_leader:
            code = peers.hear("verdict", limit)
        elif peers.is_leader:
            code = _lead(peers, world, argv, config, import_path)
            peers.tell("verdict", code)
        else:
            code = _follow(peers, world, argv, config, import_path, limit)
            print(f"doctor: {socket.gethostname()} was examined; host 0 has the table (exit code {code})")
    except PeerError as error:
        print(f"FATAL {error.kind} (rank {world.rank}): {error}\n  remedy: {error.remedy}", file=sys.stderr)
        code = error.exit_code
    if code:
        write_reported()
    acknowledge(store, world, wait=True)
    return code


def longest(config: Config, world: World) -> float:
    """Seconds after which host 0 has spoken, however many hosts are silent: the sum of all that it waits for."""
    limits = probes.patience(config, world.size, several=world.hosts > 1)
    together = probes.longest(limits) + _for_reports(limits) + 3 * SHARED_SECONDS  # write, be seen, remove
    return FACTS_SECONDS + CLOCK_SECONDS + together + REPORT_SECONDS


def _for_reports(limits: dict[str, float]) -> float:
    """Seconds that other hosts may take longer than this one, whose probes may have had the last word."""
    return max(limits.values()) + SHARED_SECONDS


def _give_up_after(seconds: float) -> None:
    """Whatever the store does: a host that is cut off hears nothing for ever."""

    def leave() -> None:
        print(f"FATAL peer: host 0 has said nothing for {seconds:.0f} s", file=sys.stderr, flush=True)
        os._exit(PeerError.exit_code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _lead(peers: Peers, world: World, argv: list[str], config: Config, import_path: Path) -> int:
    """Host 0: examines itself, collects what the others found, shows it. Returns the exit code."""
    from ddp_train.doctor import peers as several

    began, run_dir = time.monotonic(), Path(str(config.run_dir))
    reports: dict[int, Facts] = {}
    with several.listening() as place:
        found, facts = _facts(place, world, argv, config, peers.count > 1)
        everybody = peers.gather("facts", facts, FACTS_SECONDS - (time.monotonic() - began))
        offsets = peers.offsets([number for number in everybody if number], CLOCK_SECONDS)
        if len(everybody) < peers.count:
            peers.tell("everybody", None)
            there = everybody
        else:
            token = _soon(_write_token, run_dir) or ""
            peers.tell("everybody", {"hosts": everybody, "token": token})
            mine = _meet(peers, everybody, token, found, world, config, import_path)
            limits = probes.patience(config, world.size, several=peers.count > 1)
            there = reports = peers.gather("report", mine, _for_reports(limits))
            if token:
                _soon(Path(token).unlink)
    waited = time.monotonic() - began
    here = {number: everybody[number] for number in there}
    together = [examined("hosts", several.silent, here, peers.count, waited)]
    if peers.count > 1:
        together += [
            examined("clocks", several.clocks, offsets, everybody, peers.count),
            examined("config", several.same_words, everybody, peers.count),
            examined("versions", several.same_versions, everybody, peers.count),
            examined("same data", several.same_data, everybody, peers.count, config.data.name),
        ]
    said = [*everybody.values(), *reports.values()]
    of_hosts = [Finding(**values) for part in said for values in part["findings"]]
    order = list(dict.fromkeys(finding.check for finding in of_hosts))
    of_hosts.sort(key=lambda finding: order.index(finding.check))
    answers = [probes.Answer(**values) for part in reports.values() for values in part["answers"]]
    if len(reports) == peers.count:
        links = [(float(speed), str(name)) for speed, name in (part["link"] for part in reports.values())]
        answers.sort(key=lambda answer: answer.rank)
        together += of_probes(answers, config.launch.backend, _least(links), None)
    else:
        together.append(skipped("exchange", "not all hosts answer"))
    names = [facts["host"] for facts in everybody.values()]
    return report(of_hosts + together, names, run_dir, began)


def _follow(peers: Peers, world: World, argv: list[str], config: Config, import_path: Path, limit: float) -> int:
    """Every other host: examines itself, tells host 0. Returns the exit code that host 0 has found.

    limit: seconds to wait for host 0.
    """
    from ddp_train.doctor import peers as several

    with several.listening() as place:
        found, facts = _facts(place, world, argv, config, several=True)
        peers.gather("facts", facts, 0)
        peers.answer_clock(limit)
        told = peers.hear("everybody", limit)
        if told:
            everybody = {int(number): facts for number, facts in told["hosts"].items()}
            peers.gather("report", _meet(peers, everybody, told["token"], found, world, config, import_path), 0)
    return peers.hear("verdict", limit)


def _facts(place: Facts, world: World, argv: list[str], config: Config, several: bool) -> tuple[gpu.Gpus | None, Facts]:
    """What this host says of itself before it meets the others."""
    from ddp_train.distributed.preflight import versions_here

    digest, began = Aside(data_digest, config), time.monotonic()
    found, findings = at_rest(config, several, under_torchrun=True)
    asked = Aside(versions_here)  # not earlier: it may start CUDA on the GPUs that were to be seen at rest
    versions = {"processes": str(world.local_size), "driver": found.driver if found else "none"}
    try:
        versions |= asked.answer(time.monotonic() + VERSIONS_SECONDS)
    except (StuckError, RuntimeError) as error:
        findings.append(broken("versions", error))
    data = None
    with contextlib.suppress(StuckError, RuntimeError):  # the check of the data set says so
        data = digest.answer(began + LOOK_SECONDS)
    host = socket.gethostname()
    return found, {
        **place,
        "host": host,
        "words": argv,
        "versions": versions,
        "data": data,
        "findings": [asdict(finding) for finding in on_host(host, findings)],
    }


def _meet(
    peers: Peers,
    everybody: dict[int, Facts],
    token: str,
    found: gpu.Gpus | None,
    world: World,
    config: Config,
    import_path: Path,
) -> Facts:
    """What this host finds out together with the others."""
    from ddp_train.doctor import peers as several

    asked = {}
    if peers.count > 1:
        asked["shared run_dir"] = Aside(examined, "shared run_dir", several.sees_run_dir, token, TOKEN)
        asked["connections"] = Aside(examined, "connections", several.reach, everybody, peers.number)
    answers = probes.probe_together(config, world, import_path)
    deadline = time.monotonic() + SHARED_SECONDS
    findings = [examined(check, found_aside, aside, deadline) for check, aside in asked.items()]
    findings.append(examined("torch", probes.torch_on, answers, config, found.cuda if found else None))
    interface = None
    if peers.count > 1:
        address = everybody[peers.number]["address"]
        names = {held: name for name, held in addresses_of_interfaces().items()}
        interface = gloo_interface() or names.get(address, address)
    return {
        "findings": [asdict(finding) for finding in on_host(socket.gethostname(), findings)],
        "answers": [asdict(answer) for answer in answers],
        "link": link_between(config, found, interface),
    }


def _soon(do: Callable[..., Any], *arguments: Any) -> Any:
    """do(*arguments) aside; None if that takes too long or fails."""
    with contextlib.suppress(StuckError, RuntimeError):
        return Aside(do, *arguments).answer(time.monotonic() + SHARED_SECONDS)
    return None


def _write_token(run_dir: Path) -> str:
    """A file that the other hosts must see; empty where it cannot be written, which run_dir's own check reports."""
    path = run_dir.absolute() / f".doctor_{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(TOKEN)
    except OSError:
        return ""
    return str(path)


def at_rest(config: Config, several: bool, under_torchrun: bool) -> tuple[gpu.Gpus | None, list[Finding]]:
    """This host before anything runs on it: its GPUs, None without a driver, and what was found."""
    wanted = int(config.launch.nproc_per_node) if config.device == "cuda" else 0
    on_gpus = Aside(_gpus_at_rest, visible_devices(), wanted)
    checks = host_findings(config, several, under_torchrun)
    on_host = [(name, Aside(examined, name, look, *arguments)) for name, look, arguments in checks]
    deadline = time.monotonic() + LOOK_SECONDS
    try:
        values, told = on_gpus.answer(deadline)
        found, findings = gpu.from_values(values) if values else None, [Finding(**one) for one in told]
    except (StuckError, RuntimeError) as error:
        found, findings = None, [broken("gpus", error)]
    return found, findings + [examined(name, found_aside, aside, deadline) for name, aside in on_host]


def _gpus_at_rest(visible: str | None, wanted: int) -> tuple[gpu.Gpus | None, list[Finding]]:
    try:
        found = gpu.read_gpus(visible)
    except gpu.NoDriverError as error:
        return None, [examined("gpus", gpu.absent, error)]
    return found, [examined(name, look, *arguments) for name, look, arguments in gpu.gpu_findings(found, wanted)]


def of_probes(
    answers: list[probes.Answer], backend: str, link: tuple[float, str], again: list[probes.Answer] | None
) -> list[Finding]:
    """What the answers of all ranks mean together."""
    findings = [
        examined("exchange", probes.exchanged, answers, backend, again),
        examined("all-reduce", probes.bandwidth, answers, link),
        examined("stragglers", probes.stragglers, answers),
    ]
    if any(load for load in probes.loads(answers).values()):
        findings.append(examined("gpu clocks", gpu.clocks, probes.loads(answers)))
    return findings


def link_between(config: Config, found: gpu.Gpus | None, interface: str | None) -> tuple[float, str]:
    """The slowest link that gradients take from this host on: bytes per second, 0 if unknown, and its name.

    interface: the one that leads to other hosts; None if there are none.
    """
    links = []
    if config.launch.backend == "nccl" and found:
        links += [one.link for one in found.gpus if not one.error]
    if interface:
        links.append(link_bytes_per_second(interface))
    return _least(links)


def _least(links: list[tuple[float, str]]) -> tuple[float, str]:
    """Of one that is not known nothing can be said: then it is the least."""
    return min(links, default=(0.0, ""))
