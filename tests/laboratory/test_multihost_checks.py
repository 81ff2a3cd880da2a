"""Checks that compare hosts, or open connections between them."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any
from unittest import mock

import pytest

from ddp_lab.doctor import (
    host_checks,
    multihost_checks,
)
from ddp_lab.doctor.findings import OK, SKIPPED, Finding
from ddp_lab.doctor.multihost_checks import HostComparison
from tests.support.doctor import (
    config,
    is_failure,
    is_warning,
)

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


def facts(count: int = 3, **changes: Any) -> dict[int, dict[str, Any]]:
    """Of hosts that are alike; `changes` are those of the last one."""
    versions = {"python": "3.12.1", "torch": "2.11.0", "driver": "575.1"}
    made = {
        n: {"host": f"node{n}", "argv": ["seed=1"], "versions": dict(versions), "data": "abc"}
        for n in range(count)
    }
    made[count - 1] |= {name: value for name, value in changes.items() if name != "version"}
    made[count - 1]["versions"] |= changes.get("version", {})
    return made


def test_hosts_that_differ_are_named_with_both_values() -> None:
    versions = facts(version={"torch": "2.15.0", "driver": "550.2"})
    differ = HostComparison(versions, 3).versions()
    is_failure(differ, 69, "torch: node0 2.11.0, node1 2.11.0, node2 2.15.0", "driver: node0 575.1")
    overrides = HostComparison(facts(argv=["seed=2"]), 3).overrides()
    is_failure(overrides, 2, "seed=1 on rank 0 (node0), seed=2 on rank 2 (node2)")
    other_data = HostComparison(facts(data="xyz"), 3).data("mnist")
    is_failure(other_data, 65, "node1 abc, node2 xyz")
    no_data = HostComparison(facts(data=""), 3).data("image_folder")
    is_failure(no_data, 65, "node1 abc, node2 none")


def compared(everybody: dict[int, dict[str, Any]], count: int) -> list[Finding]:
    """The findings about hosts that do not differ, and whose clocks agree."""
    offsets = {number: 0.0 for number in everybody if number}
    return HostComparison(everybody, count).findings(offsets, "mnist")


def test_hosts_are_alike_only_as_far_as_they_answer() -> None:
    for finding in compared(facts(3), 3):
        assert finding.status == OK and "all 3 hosts" in finding.detail, finding
    for finding in compared(facts(2), 3):
        assert finding.status == OK and "2 of 3 hosts" in finding.detail, finding
    for finding in compared(facts(1), 2):
        assert finding.status == SKIPPED and finding.detail == "only one host answered", finding


def test_data_without_digests_is_skipped() -> None:
    own = config(data={"name": "custom", "target": "my.Data"})
    made = config()
    for one, why in ((own, "known only to its code"), (made, "digits: no files to compare")):
        everybody = facts(3)
        for number in everybody:
            everybody[number]["data"] = host_checks.data_digest(one)
        finding = HostComparison(everybody, 3).data(one.data.name)
        assert finding.status == SKIPPED and why in finding.detail, finding


def test_clocks_that_are_off_are_named() -> None:
    hosts = HostComparison(facts(), 3)
    is_failure(hosts.clocks({1: 0.1, 2: -60.0}), 69, "node2 -60.0 s", "chrony")
    is_warning(hosts.clocks({1: 0.1, 2: 2.0}), "node2 +2.0 s")
    is_warning(hosts.clocks({1: 0.1}), "no answer about the clock from node2")
    assert hosts.clocks({1: 0.1, 2: -0.2}).status == OK


def test_a_host_that_cannot_be_reached_is_named() -> None:
    with multihost_checks.listening() as place, socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        others = facts(address="127.0.0.1", port=port)
        others[0] |= {"address": "", "port": 1}
        others[1] |= place
        nowhere = multihost_checks.connections(others, 1)
        is_failure(nowhere, 69, "node0 (:1): the host has no address", "ip_local_port_range")
        assert "node2" not in nowhere.detail
    is_failure(
        multihost_checks.connections(others, 0), 69, f"node2 (127.0.0.1:{port}): Connection refused"
    )


def test_hosts_that_drop_packets_are_tried_at_the_same_time() -> None:
    with (
        socket.socket() as full,
        contextlib.ExitStack() as stack,
        mock.patch.object(multihost_checks, "CONNECT_SECONDS", 0.5),
    ):
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # from then on the kernel drops what comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        everybody = {
            number: {"host": f"node{number}", "address": "127.0.0.1", "port": full.getsockname()[1]}
            for number in range(41)
        }
        began = time.monotonic()
        finding = multihost_checks.connections(everybody, 0)
        assert time.monotonic() - began < 40 * 0.5 / 4
    is_failure(finding, 69, "node1 (127.0.0.1", "timed out", "node40 (127.0.0.1")
