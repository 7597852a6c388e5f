"""Time to first token over the turns of a chat, with the prefix cache and without it.

    python -m bench.serving.chat_turns MODEL [--chats 8] [--turns 20] [-- SETTINGS OF THE SERVER]

Each of two clients holds chats of random token ids, one after the other; all have one system prompt. A turn's prompt is
the chat so far, in the form of a template that drops the reasoning of earlier answers: their first half. So the prompt
parts from the cached one where the last answer begins. Messages end with `eos_token_id` of the model's config.json. A
second round bypasses the prefix cache. Compare a hybrid (`bench/peers/make_model.py hybrid-m42`) with an attention
model (`m42`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.serving.server import arguments, greedy_request, report, serving
from npuserve.v1 import inference_service_pb2_grpc as rpc

CLIENTS = 2
SYSTEM_TOKENS, MESSAGE_TOKENS, ANSWER_TOKENS = 120, 60, 48
START, USER, ASSISTANT, LINE, THINK = range(3, 8)
"""Ids that stand for the template's tokens."""
FIRST_ID, LAST_ID = 10, 5000
"""Ids of messages."""


@dataclass(frozen=True)
class Turn:
    seconds: float
    prompt_tokens: int
    cached_tokens: int


def hold(stub: rpc.InferenceServiceStub, seed: int, turns: int, message_end: int, bypass: bool) -> Iterator[Turn]:
    """Hold one chat. bypass: without the prefix cache."""
    draw = random.Random(seed)

    def message(role: int, content: list[int]) -> list[int]:
        return [START, role, LINE, *content, message_end, LINE]

    system = random.Random(0).choices(range(FIRST_ID, LAST_ID), k=SYSTEM_TOKENS)
    chat = message(USER, system)
    for _ in range(turns):
        chat += message(USER, draw.choices(range(FIRST_ID, LAST_ID), k=MESSAGE_TOKENS))
        prompt = [*chat, START, ASSISTANT, LINE, THINK, LINE]
        request = greedy_request(prompt, ANSWER_TOKENS)
        request.scheduling.bypass_prefix_cache = bypass
        began, seconds, answer, cached = time.monotonic(), 0.0, list[int](), 0
        for part in stub.StreamGenerate(request, timeout=600):
            if part.token_ids and not answer:
                seconds = time.monotonic() - began
            answer += part.token_ids
            cached = part.finish.usage.cached_tokens
        yield Turn(seconds, len(prompt), cached)
        chat += message(ASSISTANT, answer[len(answer) // 2 :])


def figures_of(turns: list[Turn]) -> dict[str, float]:
    times = sorted(turn.seconds for turn in turns)
    return {"cached share": round(sum(turn.cached_tokens for turn in turns) / sum(t.prompt_tokens for t in turns), 3),
            "TTFT p50 ms": round(1000 * statistics.median(times), 1),
            "TTFT p99 ms": round(1000 * times[round(0.99 * (len(times) - 1))], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--out", type=Path, help="file for the figures in JSON")
    args, flags = arguments(parser)
    end = json.loads(Path(args.model, "config.json").read_text())["eos_token_id"]
    figures = {}
    with serving(args.model, flags) as server, grpc.insecure_channel(server.target) as channel:
        stub = rpc.InferenceServiceStub(channel)
        for name, bypass in (("with prefix cache", False), ("bypassed", True)):
            with ThreadPoolExecutor(CLIENTS) as clients:
                chats = list(clients.map(
                    lambda seed, bypass=bypass: list(hold(stub, seed, args.turns, end, bypass)), range(args.chats)))
            figures[name] = figures_of([turn for chat in chats for turn in chat])
        figures["misses"] = server.samples("prefix_cache_misses_total")
    report(figures, args.out)


if __name__ == "__main__":
    main()
