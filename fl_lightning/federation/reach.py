"""On which of a machine's addresses the other machines of a run reach it."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the network's interface that gloo takes; without it, it takes the address that the machine's name leads to."""
_OUTSIDE = "192.0.2.1"  # of no machine (RFC 5737): a socket that is connected to it, by which nothing is sent, has the
# address from which this one reaches others
_ADDRESS_OF = 0x8915  # SIOCGIFADDR


@contextmanager
def reachable(nodes: int) -> Iterator[None]:
    """Let gloo take an interface that other machines reach, where this one's name leads to itself alone, or nowhere.

    So it does where ``/etc/hosts`` says ``127.0.1.1``, as Debian writes it. What the environment says stands.

    Args:
        nodes: machines of the run.
    """
    found = None
    if nodes > 1 and INTERFACE not in os.environ and not _is_outward(_own_address()):
        found = _interface_of(_address_towards(os.environ.get("MASTER_ADDR", _OUTSIDE)) or _address_towards(_OUTSIDE))
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
    """This machine's IPv4 address on the way to another one; empty where there is no way out of it."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.connect((other, 1))
        address = str(own.getsockname()[0])
        return address if _is_outward(address) else ""
    return ""


def _is_outward(address: str) -> bool:
    return not address.startswith("127.") and address not in ("", "::1")


def _interface_of(address: str) -> str | None:
    """The interface that has an IPv4 address; None where the system does not say."""
    if not address or sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                asked = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(own, _ADDRESS_OF, asked)[20:24]) == address:
                    return name
    return None
