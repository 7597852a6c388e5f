"""Which process holds the other end of a connection over loopback, as Linux shows it in /proc."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from npuserve.service.rpc.connections import AcceptedSocket, Address, SocketTable, peer_address

LOOPBACK = "127.0.0.1"
CONNECTIONS = Path("/proc/net/tcp")
_ESTABLISHED = "01"


class PeerProcess:
    """Process that alone may use a port on 127.0.0.1. `pid` is set once it runs; 0: no process may.

    port: returns the port.

    A process is recognised by its descriptors: the kernel's table of connections has the inode of the other end, and
    the descriptors of the process show whether it is one of its own. Whoever may read this process's memory, that is
    the same user and root, could also use its connections.
    """

    def __init__(self, port: Callable[[], int]):
        self._pid = 0
        self._sockets = SocketTable()  # of its own, since searches take a limited share of the time
        self._port = port
        self._verified: dict[Address, AcceptedSocket] = {}

    @property
    def pid(self) -> int:
        return self._pid

    @pid.setter
    def pid(self, pid: int) -> None:
        self._pid = pid
        self._verified.clear()

    def holds(self, peer: str) -> bool:
        """Return whether the process holds the other end of a connection, given gRPC's name of its peer."""
        address = peer_address(peer)
        verified = self._verified.get(address)
        if verified is not None and verified.is_open:
            return True
        if not self._pid or address[0] != LOOPBACK or not _holds(self._pid, _inode_of(address, self._port())):
            return False
        self._verified = {known: accepted for known, accepted in self._verified.items() if accepted.is_open}
        for accepted in self._sockets.find(peer):
            if accepted.local_port == self._port():
                self._verified[address] = accepted
        return True


def _inode_of(peer: Address, port: int) -> int:
    """Return the inode of the peer's end of a connection to 127.0.0.1:port; 0 if there is no such connection."""
    local = _hexadecimal(peer)
    remote = _hexadecimal((LOOPBACK, port))
    try:
        with CONNECTIONS.open() as lines:
            for line in lines:
                fields = line.split()
                if fields[1:4] == [local, remote, _ESTABLISHED]:
                    return int(fields[9])
    except OSError:
        pass
    return 0


def _hexadecimal(address: Address) -> str:
    """Return an IPv4 address and a port as /proc/net/tcp writes them: the address in the machine's byte order."""
    host, port = address
    number = int.from_bytes(socket.inet_aton(host), sys.byteorder)
    return f"{number:08X}:{port:04X}"


def _holds(pid: int, inode: int) -> bool:
    """Return whether a process has a descriptor of a socket. False if its descriptors cannot be read."""
    if not inode:
        return False
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    wanted = f"socket:[{inode}]"
    for name in names:
        try:
            if os.readlink(f"{folder}/{name}") == wanted:
                return True
        except OSError:  # closed meanwhile
            continue
    return False
