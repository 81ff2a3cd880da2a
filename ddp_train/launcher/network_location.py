"""How the other hosts of a run reach this one. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

from ddp_train.errors import PeerError

SIOCGIFADDR = 0x8915
"""linux/sockios.h: the address of an interface, at byte 20 of struct ifreq."""


@dataclass(frozen=True)
class NetworkLocation:
    """This host, as seen from the others."""

    address: str
    """This host's address on the route to the endpoint."""
    interface: str | None
    is_head: bool | None
    """Whether the endpoint is on this host; None lets torchrun find out."""


def find_location(endpoint: str) -> NetworkLocation:
    """Find this host's location from the resolver and the routing table, without sending a packet.

    Raises PeerError if the hosts cannot meet at `endpoint` (HOST:PORT).
    """
    name, _, port = endpoint.rpartition(":")
    here = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerError(
            f"launch.rdzv_endpoint={endpoint}: {name} does not resolve on {here}"
            f" ({error.args[-1]})",
            "add the name to /etc/hosts, or use an IP address",
        ) from error
    family, _, _, _, target = found[0]
    address = _source_address(endpoint, family, target)
    if ipaddress.ip_address(address).is_loopback:
        if name in ("localhost", target[0]):
            # All "hosts" are this one: torchrun finds out which agent serves the store.
            return NetworkLocation(address, None, None)
        raise PeerError(
            f"launch.rdzv_endpoint={endpoint}: {name} resolves to {target[0]} on {here}, a loopback"
            " address that no other host can reach",
            f"give {name} its own address in /etc/hosts (Debian writes 127.0.1.1), or use that IP"
            " address",
        )
    is_head = address == target[0]
    if is_head:
        _check_free(endpoint, family, int(port))
    interfaces = {held: interface for interface, held in addresses_of_interfaces().items()}
    return NetworkLocation(address, interfaces.get(address), is_head)


def _source_address(endpoint: str, family: int, target: tuple) -> str:
    """The address of this host on the route to the endpoint."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise PeerError(
                f"launch.rdzv_endpoint={endpoint}: no route from {socket.gethostname()} to"
                f" {target[0]} ({error.strerror})",
                "check the address, and the routes of this host: `ip route`",
            ) from error
        return str(probe.getsockname()[0])


def _check_free(endpoint: str, family: int, port: int) -> None:
    """Raises PeerError if the port is in use.

    torchrun would take any listener for the store and wait for it.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            problem = f"cannot be used ({error.strerror})"
            if error.errno == errno.EADDRINUSE:
                problem = "is in use by another process"
            raise PeerError(
                f"launch.rdzv_endpoint={endpoint}: port {port} of {socket.gethostname()} {problem}",
                f"use another port; `ss -ltnp sport = :{port}` shows which process has it",
            ) from error


def addresses_of_interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one.

    With IPv6, gloo and NCCL choose an interface.
    """
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses
