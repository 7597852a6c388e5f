"""CPU time that KV events add to the engine, in microseconds per block of the prefix cache.

    python bench/engine/kv_events_cost.py [--blocks 4096] [--block-size 16] [--rounds 20] [--json]

Prompts of 64 blocks are registered and evicted by the block manager, as after their steps.

    off          --kv-events off
    unread       events are on, and nobody has subscribed
    read         there is a subscriber: changes are recorded
    publish      batches are made of the recorded changes, encoded and passed to the socket, outside of a step

The first three alternate in each round. Prints medians of the rounds; `off` includes hashing the tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from npuserve.service.engine.kv_event_log import KvEventLog
from npuserve.service.engine.kv_event_stream import KvEventStream
from npuserve.service.ipc.kv_events import ReadKvEvents, SubscribeKvEvents, ToSubscriber, UnsubscribeKvEvents
from npuserve.service.scheduling.block_manager import BlockManager, BlockTable

PROMPT_BLOCKS = 64
KINDS = ("off", "unread", "read")


class Cache:
    """Full prefix cache, with a stream of its events unless they are off."""

    def __init__(self, kind: str, blocks: int, size: int):
        self._size = size
        log = None if kind == "off" else KvEventLog(size)
        self._blocks = BlockManager(blocks, size, events=log)
        self._stream = KvEventStream(log, size, 1, 10_000) if log else None
        self._sent: list[ToSubscriber] = []
        if self._stream and kind == "read":
            self._stream.handle(b"", SubscribeKvEvents(1, 0), self._send)
            self.publish()

    def replace(self, prompts: list[list[int]]) -> float:
        """Compute prompts that evict all others. Return microseconds per block."""
        tables = [BlockTable() for _ in prompts]
        began = time.perf_counter()
        for table, tokens in zip(tables, prompts, strict=True):
            assert self._blocks.allocate(table, len(tokens))
            self._blocks.register(table, tokens, len(tokens))
            self._blocks.free(table)
        return 1e6 * (time.perf_counter() - began) / (len(prompts) * PROMPT_BLOCKS)

    def publish(self) -> float:
        """Publish what was recorded. Return seconds."""
        assert self._stream
        began = time.perf_counter()
        while self._stream.has_work:
            self._stream.publish(self._send)
            self._stream.handle(b"", ReadKvEvents(1, 1 << 30), self._send)
        return time.perf_counter() - began

    def close(self) -> None:
        if self._stream:
            self._stream.handle(b"", UnsubscribeKvEvents(1), self._send)

    def _send(self, sender: bytes, message: ToSubscriber) -> None:
        self._sent = [message]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4096, help="blocks of the cache (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    chance = random.Random(0)
    caches = {kind: Cache(kind, args.blocks, args.block_size) for kind in KINDS}
    found: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "publish")}
    for turn in range(args.rounds + 1):
        prompts = [[chance.randrange(150_000) for _ in range(PROMPT_BLOCKS * args.block_size)]
                   for _ in range(args.blocks // PROMPT_BLOCKS)]
        times = {kind: cache.replace(prompts) for kind, cache in caches.items()}
        times["publish"] = 1e6 * caches["read"].publish() / (len(prompts) * PROMPT_BLOCKS)
        if turn:  # the first fills the cache
            for kind, value in times.items():
                found[kind].append(value)
    for cache in caches.values():
        cache.close()
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    if args.json:
        print(json.dumps({"block_size": args.block_size, "microseconds_per_block": medians}))
    else:
        print("microseconds per block: " + ", ".join(f"{kind} {value:.2f}" for kind, value in medians.items()))


if __name__ == "__main__":
    main()
