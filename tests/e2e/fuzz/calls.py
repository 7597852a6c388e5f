"""Malformed protobuf in valid HTTP/2: many concurrent calls, and their statuses."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator

import grpc.aio

from tests.e2e.fuzz.wire import KEY, Noise

AT_ONCE = 48
BEARER = (("authorization", f"Bearer {KEY}"),)
UNREADABLE = re.compile("malformed protobuf$|must be valid UTF-8$")


async def calls(target: str, methods: dict[str, bool], noise: Noise, count: int) -> Counter[str]:
    """Count the status names of the calls, and as UNREAD the INVALID_ARGUMENT of requests that protobuf cannot parse.

    methods: full name -> True for a streaming method.
    """
    codes: Counter[str] = Counter()
    names = sorted(methods)

    async def one(channel: grpc.aio.Channel, number: int) -> None:
        name, body = names[number % len(names)], noise.body()
        try:
            if methods[name]:
                async for _ in channel.unary_stream(name)(body, timeout=20, metadata=BEARER):
                    pass
            else:
                await channel.unary_unary(name)(body, timeout=20, metadata=BEARER)
            codes["OK"] += 1
        except grpc.aio.AioRpcError as error:
            unread = error.code() is grpc.StatusCode.INVALID_ARGUMENT and bool(
                UNREADABLE.search(error.details() or ""))
            codes["UNREAD" if unread else error.code().name] += 1

    async def client(channel: grpc.aio.Channel, numbers: Iterator[int]) -> None:
        for number in numbers:
            await one(channel, number)

    async with grpc.aio.insecure_channel(target) as channel:
        numbers = iter(range(count))
        await asyncio.gather(*(client(channel, numbers) for _ in range(AT_ONCE)))
    return codes
