"""Calls with n above 1 in a real server: seeds, ends, shared blocks, cancels, and the death of the engine."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from npuserve.cli import main as cli
from npuserve.client import Client
from npuserve.v1 import admin_service_pb2, admin_service_pb2_grpc
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc
from tests.e2e import brittle
from tests.e2e.processes import engine_of, until
from tests.e2e.server import Server, request, serving, streamed
from tests.support.connect import connect

BLOCK = 16
PROMPT = random.Random(3).choices(range(3, 500), k=16 * BLOCK)
"""Its samples share 15 blocks; each computes the last one itself."""
SHARED = len(PROMPT) // BLOCK - 1


class Sample(NamedTuple):
    """Answer without its timing."""

    text: str
    token_ids: list[int]
    reason: int
    matched_stop: str
    generated_tokens: int
    logprobs: list[tuple[int, float]]


class Samples(NamedTuple):
    """Server with its key, and a file whose existence makes each step slower by the seconds in it."""

    server: Server
    key: str
    slow: Path

    @contextlib.contextmanager
    def slowed(self, seconds: float) -> Iterator[None]:
        self.slow.write_text(str(seconds))
        try:
            yield
        finally:
            self.slow.unlink()

    def blocks(self, state: str) -> float:
        return self.server.metric("npuserve_kv_cache_blocks", state=state)

    def wait_until_free(self) -> None:
        until(lambda: not (self.blocks("used") or self.server.metric("npuserve_requests_running")
                           or self.server.metric("npuserve_requests_waiting")), self.server)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Samples]:
    folder = tmp_path_factory.mktemp("samples")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["keys", "add", str(folder / "keys"), "root", "--admin"]) == 0
    key = out.getvalue().strip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(brittle.SLOW, str(folder / "slow"))
        with serving(
            "--dtype", "float32", "--block-size", str(BLOCK), "--max-num-batched-tokens", "64", "--debuggable",
            "--api-keys", str(folder / "keys"), program=("-m", "tests.e2e.brittle", "serve")
        ) as server:
            server.channel = connect(server.target, key)
            server.stub = rpc.InferenceServiceStub(server.channel)
            made = Samples(server, key, folder / "slow")
            yield made
            made.wait_until_free()


def sample(text: str, ids: Iterable[int], finish: pb.Finish, logprobs: Iterable[pb.PositionLogprobs]) -> Sample:
    return Sample(text, list(ids), finish.reason, finish.matched_stop, finish.usage.generated_tokens,
                  [(position.chosen.token_id, position.chosen.logprob) for position in logprobs])


def of_unary(answer: pb.GenerateResponse | pb.Sample) -> Sample:
    return sample(answer.text, answer.token_ids, answer.finish, answer.logprobs)


def of_stream(parts: Iterable[pb.StreamGenerateResponse]) -> list[Sample]:
    """Return the samples of a stream in order of index. Check the contract of each sample's messages."""
    found: defaultdict[int, list[pb.StreamGenerateResponse]] = defaultdict(list)
    for part in parts:
        some = found[part.index]
        assert not some or not some[-1].HasField("finish"), "a message after the sample's finish"
        assert part.offset == sum(one.num_tokens for one in some)
        some.append(part)
    return [sample(
        "".join(part.text for part in found[index]), (token for part in found[index] for token in part.token_ids),
        found[index][-1].finish, (position for part in found[index] for position in part.logprobs))
        for index in sorted(found)]


def alone(server: Server, ask: pb.GenerateRequest) -> list[Sample]:
    """Return the answers of separate requests with n = 1 and the seeds of the samples."""
    answers = []
    for index in range(ask.n):
        one = pb.GenerateRequest()
        one.CopyFrom(ask)
        one.n, one.sampling.seed = 1, (ask.sampling.seed + index) % 2**64
        answers.append(of_unary(server.stub.Generate(one, timeout=100)))
    return answers


ASKS = {
    "sampled": request("Once upon a time", 60, n=5, temperature=1.0, seed=7, logprobs=2),
    "last seed": request("One day", 40, n=3, temperature=0.9, top_p=0.9, seed=2**64 - 2),
    "stop strings": request(
        "The cat and the dog", 40, n=6, temperature=1.0, seed=3, min_tokens=8, stop=[" run", " very", " One"]),
    "penalties": request("The cat", 40, n=3, temperature=0.8, seed=11, repetition_penalty=1.3, presence_penalty=0.5),
    "bypass": request(PROMPT, 20, n=4, temperature=1.0, seed=5, ignore_eos=True, bypass_prefix_cache=True),
    "greedy": request("Tim wanted a new toy. He", 30, n=4),
    "prompt logprobs": request(PROMPT, 10, n=3, temperature=1.0, seed=1, ignore_eos=True, prompt_logprobs=1),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.full] * (name in ("last seed", "penalties", "bypass"))) for name in ASKS])
def test_samples_equal_separate_requests(samples: Samples, name: str) -> None:
    """Alone and among others, as a stream and unary."""
    ask, server = ASKS[name], samples.server
    expected = alone(server, ask)
    others = [request("There was a big red ball", 60, n=3, temperature=1.0, seed=seed) for seed in range(2)]
    with ThreadPoolExecutor(4) as threads:
        noise = [threads.submit(server.stub.Generate, other, timeout=100) for other in others]
        stream = of_stream(server.stub.StreamGenerate(ask, timeout=100))
        unary = server.stub.Generate(ask, timeout=100)
        for one in noise:
            one.result()
    assert stream == expected
    assert list(map(of_unary, unary.samples)) == expected
    assert [one.index for one in unary.samples] == list(range(ask.n))
    assert (unary.text, list(unary.token_ids), unary.HasField("finish")) == ("", [], False)
    assert len(unary.prompt_logprobs) == (len(PROMPT) if name == "prompt logprobs" else 0)
    if name == "greedy":
        assert len({one.text for one in expected}) == 1
    elif name == "stop strings":
        assert len({one.generated_tokens for one in expected}) > 1
        assert len({one.matched_stop for one in expected}) > 1
    else:
        assert len({tuple(one.token_ids) for one in expected}) == ask.n


def peak(samples: Samples, work: Callable[[], object]) -> float:
    """Return the largest number of used blocks while `work` runs."""
    thread = threading.Thread(target=work)
    thread.start()
    most = 0.0
    while thread.is_alive():
        most = max(most, samples.blocks("used"))
        time.sleep(0.05)  # a page takes more time than a step
    thread.join()
    return most


@pytest.mark.parametrize("bypass", [False, pytest.param(True, marks=pytest.mark.full)])
def test_samples_share_blocks(samples: Samples, bypass: bool) -> None:
    """Eight samples hold the blocks of the prompt once. Eight requests with different salts hold them eight times."""
    stub, tokens = samples.server.stub, 3 * BLOCK
    own = (len(PROMPT) + tokens) // BLOCK - SHARED + 1  # blocks of one sample, at most
    fields = {"ignore_eos": True, "bypass_prefix_cache": bypass, "temperature": 1.0}
    together = request(PROMPT, tokens, n=8, cache_salt=f"shared {bypass}", **fields)
    apart = [request(PROMPT, tokens, cache_salt=f"{bypass} {salt}", **fields) for salt in range(8)]

    def separately() -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda ask: stub.Generate(ask, timeout=100), apart))

    answers: list[pb.GenerateResponse] = []
    with samples.slowed(0.01):
        used = peak(samples, lambda: answers.append(stub.Generate(together, timeout=100)))
        used_apart = peak(samples, separately)
    assert SHARED + 8 <= used <= SHARED + 8 * own
    assert used_apart >= 8 * (SHARED + 1)
    cached = [one.finish.usage.cached_tokens for one in answers[0].samples]
    assert cached == [0] + [SHARED * BLOCK] * 7


@pytest.mark.parametrize("how", ["cancel", pytest.param("deadline", marks=pytest.mark.full), "abort"])
def test_end_of_a_call_frees_all_samples(samples: Samples, how: str) -> None:
    stub = samples.server.stub
    ask = request(PROMPT, 200, n=8, temperature=1.0, ignore_eos=True, request_id="mine")
    # The margin before a deadline is two steps: a stall of the machine cannot miss it.
    with samples.slowed(0.2 if how == "deadline" else 0.02):
        call = stub.StreamGenerate(ask, timeout=4 if how == "deadline" else 100)
        parts = [next(call)]
        if how == "abort":
            admin = admin_service_pb2_grpc.AdminServiceStub(samples.server.channel)
            admin.Abort(admin_service_pb2.AbortRequest(request_id="mine"))
        if how == "cancel":
            call.cancel()
        else:
            parts += call
            reason = pb.FINISH_REASON_ABORTED if how == "abort" else pb.FINISH_REASON_DEADLINE
            assert [one.reason for one in of_stream(parts)] == [reason] * 8
        samples.wait_until_free()
    assert len(stub.Generate(request("x", 2, n=2, request_id="mine")).samples) == 2


@pytest.mark.full
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_engine_death_shows_in_no_sample(samples: Samples, moment: str) -> None:
    """By default tests/service/engine/test_loop_samples.py and tests/service/scheduling/test_sample_groups.py restore
    samples."""
    server = samples.server
    ask = request(PROMPT, 60, n=4, temperature=1.0, seed=21, logprobs=0, ignore_eos=True)
    if moment == "prefill":
        ask.scheduling.bypass_prefix_cache = True
    expected = alone(server, ask)
    with samples.slowed(0.1):
        call = server.stub.StreamGenerate(ask, timeout=100)
        call.initial_metadata()
        parts = [next(call)] if moment == "decode" else []
        os.kill(engine_of(server), signal.SIGKILL)
    assert of_stream([*parts, *call]) == expected


@pytest.mark.full
def test_samples_that_kill_the_engine_end_with_one_error() -> None:
    """By default test_deaths.py has a request that kills the engine."""
    with serving(**brittle.COUNTING) as server:
        ask = request("Once upon a time", 400, n=3, ignore_eos=True)
        expected = alone(server, ask)
        other = server.stub.StreamGenerate(ask, timeout=100)
        first = next(other)
        poison = request([5, brittle.POISON, 6], 50, n=3, ignore_eos=True)
        with pytest.raises(grpc.RpcError) as failed:
            list(server.stub.StreamGenerate(poison, timeout=100))
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert "the engine died" in (failed.value.details() or "")  # type: ignore[attr-defined]
        assert of_stream([first, *other]) == expected
        until(lambda: not server.metric("npuserve_requests_running"), server)
        assert server.metric("npuserve_kv_cache_blocks", state="used") == 0


def test_client_reads_samples(samples: Samples) -> None:
    ask = ASKS["sampled"]
    expected = alone(samples.server, ask)
    with Client(samples.server.target, api_key=samples.key) as client:
        assert list(map(of_unary, client.generate(ask).samples)) == expected
        stream = client.stream(ask)
        assert of_stream(stream) == expected
        assert stream.attempts.resume_token == ""
        assert stream.attempts.tokens == sum(one.generated_tokens for one in expected)
    text, _, _ = streamed(samples.server.stub, request("Once upon a time", 60, temperature=1.0, seed=7))
    assert text == expected[0].text


@pytest.mark.full
def test_call_beyond_the_queue_is_refused_as_a_whole() -> None:
    with serving("--max-num-seqs", "2", "--max-queue", "4", **brittle.COUNTING) as server:
        with pytest.raises(grpc.RpcError, match=r"n: must be in \[1, 6\]"):
            server.stub.Generate(request("x", 5, n=7))
        long = server.stub.StreamGenerate(request("Once", 300, n=4, ignore_eos=True))
        first = next(long)
        with pytest.raises(grpc.RpcError) as full:
            server.stub.Generate(request("x", 5, n=3))
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(of_stream([first, *long])) == 4
        assert len(server.stub.Generate(request("x", 5, n=6)).samples) == 6
