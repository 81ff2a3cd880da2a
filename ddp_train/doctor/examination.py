"""`mode=doctor`: all checks in their order, on this host alone or on each of several under torchrun."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_train.config.schema import Config
from ddp_train.distributed.world import (
    TOLD,
    World,
    gloo_interface,
    host_number,
    hosts_started,
    say_last_word,
    visible_devices,
)
from ddp_train.doctor import gpu, probes
from ddp_train.doctor.findings import Finding, examined, on_host, report, skipped
from ddp_train.doctor.host import data_digest, host_findings, link_bytes_per_second
from ddp_train.errors import PeerError
from ddp_train.hosts import addresses_of_interfaces

if TYPE_CHECKING:  # torch is imported where there are other hosts to talk to
    from ddp_train.distributed.session import Store
    from ddp_train.doctor.peers import Peers

LIMIT_SECONDS = 300.0
"""After so long a host gives up on host 0, whatever the store does: one that is cut off answers never."""
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


def examine_together(store: Store, world: World, words: list[str], config: Config, import_path: Path) -> int:
    """This process of torchrun. The first one of each host is its doctor, the others wait for what host 0 says.

    words: the command line. Returns the exit code, the same on all.
    """
    from ddp_train.distributed.preflight import acknowledge
    from ddp_train.doctor.peers import Peers

    peers = Peers(store, host_number(world), hosts_started(world), world.attempt)
    if not world.is_leader:
        _give_up_after(LIMIT_SECONDS)
    try:
        if not world.is_local_leader:
            code = peers.hear("verdict", LIMIT_SECONDS)
        elif peers.is_leader:
            code = _lead(peers, world, words, config, import_path)
            peers.tell("verdict", code)
        else:
            code = _follow(peers, world, words, config, import_path)
            print(f"doctor: {socket.gethostname()} was examined; host 0 has the table (exit code {code})")
    except PeerError as error:
        print(f"FATAL {error.kind} (rank {world.rank}): {error}\n  remedy: {error.remedy}", file=sys.stderr)
        code = error.exit_code
    if code:
        say_last_word(TOLD)
    acknowledge(store, world, wait=True)
    return code


def _give_up_after(seconds: float) -> None:
    def leave() -> None:
        print(f"FATAL peer: host 0 has said nothing for {seconds:.0f} s", file=sys.stderr, flush=True)
        os._exit(PeerError.exit_code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _lead(peers: Peers, world: World, words: list[str], config: Config, import_path: Path) -> int:
    """Host 0: examines itself, collects what the others found, shows it. Returns the exit code."""
    from ddp_train.doctor import peers as several

    began, run_dir = time.monotonic(), Path(str(config.run_dir))
    limit = min(probes.START_SECONDS, config.launch.timeout_seconds)
    longest = probes.START_SECONDS + 2 * probes.PATIENCE_SECONDS + several.REACH_SECONDS * peers.count
    reports: dict[int, Facts] = {}
    with several.listening() as place:
        found, facts = _facts(place, world, words, config, peers.count > 1)
        everybody = peers.gather("facts", facts, limit)
        offsets = peers.offsets([number for number in everybody if number], limit)
        if len(everybody) < peers.count:
            peers.tell("everybody", None)
            there, waited = everybody, limit
        else:
            token = _write_token(run_dir)
            peers.tell("everybody", {"hosts": everybody, "token": token})
            mine = _meet(peers, everybody, token, found, world, config, import_path)
            there = reports = peers.gather("report", mine, longest)
            waited = longest
            if token:
                Path(token).unlink()
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


def _follow(peers: Peers, world: World, words: list[str], config: Config, import_path: Path) -> int:
    """Every other host: examines itself, tells host 0. Returns the exit code that host 0 has found."""
    from ddp_train.doctor import peers as several

    with several.listening() as place:
        found, facts = _facts(place, world, words, config, several=True)
        peers.gather("facts", facts, 0)
        peers.answer_clock(LIMIT_SECONDS)
        told = peers.hear("everybody", LIMIT_SECONDS)
        if told:
            everybody = {int(number): facts for number, facts in told["hosts"].items()}
            peers.gather("report", _meet(peers, everybody, told["token"], found, world, config, import_path), 0)
    return peers.hear("verdict", LIMIT_SECONDS)


def _facts(
    place: Facts, world: World, words: list[str], config: Config, several: bool
) -> tuple[gpu.Gpus | None, Facts]:
    """What this host says of itself before it meets the others."""
    from ddp_train.distributed.preflight import versions_here

    found, findings = at_rest(config, several, under_torchrun=True)
    versions = {**versions_here(), "processes": str(world.local_size), "driver": found.driver if found else "none"}
    host = socket.gethostname()
    return found, {
        **place,
        "host": host,
        "words": words,
        "versions": versions,
        "data": data_digest(config),
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

    findings = []
    if peers.count > 1:
        findings.append(examined("shared run_dir", several.sees_run_dir, token, TOKEN))
        findings.append(examined("connections", several.reach, everybody, peers.number))
    answers = probes.probe_together(config, world, import_path)
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
    found = None
    try:
        found = gpu.read_gpus(visible_devices())
        findings = [examined(name, look, *arguments) for name, look, arguments in gpu.gpu_findings(found, wanted)]
    except gpu.NoDriverError as error:
        findings = [examined("gpus", gpu.absent, error)]
    checks = host_findings(config, several, under_torchrun)
    return found, findings + [examined(name, look, *arguments) for name, look, arguments in checks]


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
