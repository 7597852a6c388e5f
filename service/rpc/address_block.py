"""Block of addresses: the kernel drops the packets with which they open connections to this process's port.

A client whose packets are dropped repeats them after 1, 3 and 7 s. So an honest client behind the same address is
delayed, and refused only if its patience is shorter than the block. Open connections are not affected.

A classic BPF program is attached to the listening sockets, which needs no privilege. A socket inherits the program at
its acceptance. It names addresses which cannot be the peer of an accepted connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Set

from npuserve.service import logs
from npuserve.service.rpc.connections import open_descriptors

log = logging.getLogger(__name__)

BLOCK_SECONDS = 10.0
MAX_ADDRESSES = 32
"""Blocked addresses at a time; the one that was blocked first is allowed again."""
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
INSTRUCTION_BYTES = 8
_LOAD_HALF = 0x28
_LOAD_WORD = 0x20
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_PROTOCOL = 0xFFFFF000
"""Place of a packet's protocol, as Ethernet numbers it: SKF_AD_OFF + SKF_AD_PROTOCOL."""
_NETWORK_HEADER = 0xFFF00000
"""SKF_NET_OFF"""
_IPV4 = 0x0800
_ACCEPT = 0xFFFFFFFF
_DROP = 0


class AddressBlock:
    """Blocked addresses of this process's ports. Use it from one thread."""

    def __init__(self) -> None:
        # (port, IPv4 address or IPv6 network) -> time.monotonic() of the end
        self._until: OrderedDict[tuple[int, str], float] = OrderedDict()
        self._has_warned = False

    def block(self, host: str, port: int) -> None:
        """Block an address for BLOCK_SECONDS; of IPv6 its network of 64 bits."""
        key = (port, network_of(host))
        self._until.pop(key, None)
        self._until[key] = time.monotonic() + BLOCK_SECONDS
        changed = {port}
        if len(self._until) > MAX_ADDRESSES:
            (allowed_port, _), _ = self._until.popitem(last=False)
            changed.add(allowed_port)
        self._apply(changed)

    def expire(self) -> None:
        """Allow the addresses whose time is over."""
        now = time.monotonic()
        expired = [key for key, until in self._until.items() if until <= now]
        for key in expired:
            del self._until[key]
        self._apply({port for port, _ in expired})

    def _apply(self, ports: Set[int]) -> None:
        for port in ports:
            networks = [network for of_port, network in self._until if of_port == port]
            for descriptor in _listeners(port):
                listener = socket.SocketType(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)
                try:
                    _attach(listener, networks)
                except OSError as error:
                    self._warn(error)
                listener.detach()  # gRPC closes the descriptor

    def _warn(self, error: OSError) -> None:
        """Log once that the system has no such filters."""
        if not self._has_warned:
            self._has_warned = True
            logs.event(log, "the system refuses packet filters: addresses of attackers are not blocked",
                       level=logging.WARNING, error=str(error))


def _attach(listener: socket.SocketType, networks: list[str]) -> None:
    """Replace the program of a socket. Raises OSError."""
    if not networks:
        listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        return
    code = program(networks)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("@HP", len(code) // INSTRUCTION_BYTES, ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)


def program(networks: list[str]) -> bytes:
    """Return the BPF program that drops packets of these IPv4 addresses and IPv6 networks of 64 bits."""
    ipv4: list[bytes] = []
    ipv6: list[bytes] = []
    for name in networks:
        network = ipaddress.ip_network(name)
        words = struct.unpack(f">{len(network.network_address.packed) // 4}I", network.network_address.packed)
        if network.version == 4:
            ipv4 += [_instruction(_JUMP_IF_EQUAL, 0, 1, words[0]), _instruction(_RETURN, 0, 0, _DROP)]
        else:
            ipv6 += [
                _instruction(_LOAD_WORD, 0, 0, _NETWORK_HEADER + 8), _instruction(_JUMP_IF_EQUAL, 0, 3, words[0]),
                _instruction(_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12), _instruction(_JUMP_IF_EQUAL, 0, 1, words[1]),
                _instruction(_RETURN, 0, 0, _DROP)]
    accept = _instruction(_RETURN, 0, 0, _ACCEPT)
    source = _instruction(_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12)
    ipv4 = [source, *ipv4, accept]
    first = [_instruction(_LOAD_HALF, 0, 0, _PROTOCOL), _instruction(_JUMP_IF_EQUAL, 0, len(ipv4), _IPV4)]
    return b"".join([*first, *ipv4, *ipv6, accept])


def _instruction(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("@HBBI", code, if_true, if_false, operand)


def network_of(host: str) -> str:
    """Return what is blocked with an address: itself, of IPv6 its network of 64 bits."""
    address = ipaddress.ip_address(host)
    return host if address.version == 4 else str(ipaddress.ip_network((host, 64), strict=False))


def _listeners(port: int) -> list[int]:
    """Return the descriptors of this process that listen on the port."""
    listeners = []
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket of TCP
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                candidate = socket.socket(fileno=descriptor)
                try:
                    is_listening = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if is_listening and candidate.family != socket.AF_UNIX and candidate.getsockname()[1] == port:
                        listeners.append(descriptor)
                finally:
                    candidate.detach()
    return listeners
