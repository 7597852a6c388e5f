"""Block of addresses by a packet filter of the listening socket."""

from __future__ import annotations

import socket

import pytest

from npuserve.service.rpc import address_block
from npuserve.service.rpc.address_block import MAX_ADDRESSES, AddressBlock, program


def connects(source: str, listener: socket.socket) -> bool:
    """Return whether a client of this address connects. The first repetition of its packet comes after 1 s."""
    host = "::1" if ":" in source else "127.0.0.1"
    with socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET) as client:
        client.bind((source, 0))
        client.settimeout(0.3)
        try:
            client.connect((host, listener.getsockname()[1]))
        except TimeoutError:
            return False
    return True


@pytest.mark.parametrize(("blocked", "others"), [
    ("127.0.0.2", ("127.0.0.1", "127.0.0.3", "::1")), ("::1", ("127.0.0.1", "127.0.0.2"))])
def test_address_block_delays_new_connections_of_the_address_alone(
    blocked: str, others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        family = socket.AF_INET6 if ":" in blocked else socket.AF_INET
        with socket.socket(family) as earlier:
            earlier.bind((blocked, 0))
            earlier.connect(("::1" if family == socket.AF_INET6 else "127.0.0.1", port))
            accepted, _ = listener.accept()
            block = AddressBlock()
            block.block("10.0.0.1", port)
            block.block(blocked, port)
            assert not connects(blocked, listener)
            assert all(connects(other, listener) for other in others)
            earlier.sendall(b"x")
            accepted.settimeout(30)
            assert accepted.recv(1) == b"x"
            accepted.close()
        now = address_block.time.monotonic()
        monkeypatch.setattr(address_block.time, "monotonic", lambda: now + address_block.BLOCK_SECONDS + 1)
        block.expire()
        assert connects(blocked, listener)


def test_address_block_keeps_the_latest_addresses() -> None:
    block = AddressBlock()
    for number in range(2 * MAX_ADDRESSES):
        block.block(f"10.0.0.{number}", 1)
    assert [network for _, network in block._until] == [
        f"10.0.0.{number}" for number in range(MAX_ADDRESSES, 2 * MAX_ADDRESSES)]


def test_program_of_the_most_addresses_is_accepted_by_the_kernel() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        for networks in ([f"10.0.0.{number}" for number in range(MAX_ADDRESSES)],
                         [f"fd00:0:0:{number:x}::/64" for number in range(MAX_ADDRESSES)]):
            assert len(program(networks)) <= 4096 * address_block.INSTRUCTION_BYTES
            address_block._attach(listener, networks)
            assert connects("127.0.0.1", listener)


def test_block_of_a_system_without_filters_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Protocol not available")

    monkeypatch.setattr(address_block, "_attach", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        block = AddressBlock()
        for number in range(2):
            block.block(f"10.0.0.{number}", listener.getsockname()[1])
    assert [record.getMessage() for record in caplog.records] == [
        "the system refuses packet filters: addresses of attackers are not blocked"]
