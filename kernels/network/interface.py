"""Finds the address at which other hosts reach this one.

Libraries look up the host's own name, which gives 127.0.1.1 on many machines. Here the user's choice comes first, then
the kernel's: the address from which it would send to a given other host.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

from ..errors import MeshError

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


def chosen() -> str | None:
    """The interface, or address, that the user has set: SPMD_INTERFACE, else the first of GLOO_SOCKET_IFNAME."""
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return os.environ.get("SPMD_INTERFACE") or gloo or None


def address_of(interface: str) -> str:
    """The address of a network interface; an address is itself.

    >>> address_of("lo"), address_of("10.1.2.3")
    ('127.0.0.1', '10.1.2.3')

    Raises:
        MeshError: this host has no such interface, or it has no IPv4 address.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    try:
        return _address_of(interface)
    except OSError as error:
        raise MeshError(
            f"network interface {interface!r} can't be used on {socket.gethostname()}",
            got=str(error),
            expected=f"one of {sorted(addresses())}, or an address of this host",
            remedy="correct SPMD_INTERFACE, GLOO_SOCKET_IFNAME or initialize(interface=)",
        ) from None


def addresses() -> dict[str, str]:
    """This host's interfaces that have an IPv4 address."""
    found = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            found[name] = _address_of(name)
    return found


def _address_of(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))[20:24])


def towards(host: str) -> str | None:
    """The address from which this host would send to another; None if it is this one, or can't be reached."""
    with contextlib.suppress(OSError, UnicodeError):  # the latter: it can't be a name
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing, on a datagram socket
            own = probe.getsockname()[0]
        if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            return own
    return None


def loopback() -> str:
    """The loopback's IPv4 address.

    Raises:
        MeshError: it has none, so that no connection to it would ever be made.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_LOOPBACK, 9))
    except OSError as error:
        raise MeshError(
            f"{_LOOPBACK} can't be reached on {socket.gethostname()}",
            got=str(error),
            expected="an IPv4 address of the loopback",
            remedy="give it one (ip link set lo up; ip addr add 127.0.0.1/8 dev lo)",
        ) from None
    return _LOOPBACK


def is_loopback(host: str) -> bool:
    """Whether an address, or "localhost", leads to this host alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
