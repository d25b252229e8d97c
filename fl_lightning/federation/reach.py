"""On which of a machine's addresses the other machines of a run reach it."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the network's interface that gloo takes; without it, it takes the address that the machine's name leads to."""
_OUTSIDE = "192.0.2.1"  # of no machine (RFC 5737): a socket that is connected to it, by which nothing is sent, has the
# address from which this one reaches others
_OUTSIDE_V6 = "2001:db8::1"  # the same where there is IPv6 alone (RFC 3849)
_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_ADDRESSES_V6 = Path("/proc/net/if_inet6")


@contextmanager
def reachable(nodes: int) -> Iterator[None]:
    """Let gloo take an interface that other machines reach, where this one's name leads to itself alone, or nowhere.

    So it does where ``/etc/hosts`` says ``127.0.1.1``, as Debian writes it. What the environment says stands.

    Args:
        nodes: machines of the run.
    """
    found = None
    if nodes > 1 and INTERFACE not in os.environ and not _is_outward(_own_address()):
        others = (os.environ.get("MASTER_ADDR", _OUTSIDE), _OUTSIDE, _OUTSIDE_V6)
        found = _interface_of(next(filter(None, map(_address_towards, others)), ""))
    if found is not None:
        os.environ[INTERFACE] = found
    try:
        yield
    finally:
        if found is not None:
            del os.environ[INTERFACE]


def _own_address() -> str:
    """The address that gloo would take: the first one of the machine's name that is its own; empty for none."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(socket.gethostname(), None):
            with suppress(OSError), socket.socket(family, kind, protocol) as own:
                own.bind(address)
                return str(address[0])
    return ""


def _address_towards(other: str) -> str:
    """This machine's address on the way to another one, IPv4 where it can be; empty where there is no way out of it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, UnicodeError), socket.socket(family, socket.SOCK_DGRAM) as own:
            own.connect((other, 1))
            address = str(own.getsockname()[0])
            if _is_outward(address):
                return address
    return ""


def _is_outward(address: str) -> bool:
    """Whether other machines reach it; one of IPv6's own for a cable (``fe80``) means something beside an interface."""
    return not address.lower().startswith(("127.", "fe80:")) and address not in ("", "::1")


def _interface_of(address: str) -> str | None:
    """The interface that has an address; None where the system does not say."""
    if not address or sys.platform != "linux":
        return None
    return _interface_of_v6(address) if ":" in address else _interface_of_v4(address)


def _interface_of_v6(address: str) -> str | None:
    number = socket.inet_pton(socket.AF_INET6, address).hex()
    with suppress(OSError):  # without /proc
        for line in _ADDRESSES_V6.read_text().splitlines():
            other, *_, name = line.split()
            if other == number:
                return name
    return None


def _interface_of_v4(address: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                asked = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(own, _ADDRESS_OF, asked)[20:24]) == address:
                    return name
    return None
