"""Fake engine at the engine's end of the socket. Its answers count up from the last token of the prompt.

The next id is (last id + 1) mod CYCLE: with the alphabet's tokenizer of `make_folder`, "cdef…" follows "ab".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from npuserve.npu.profile import ProfileSummary
from npuserve.npu.step import TokenLogprobs
from npuserve.service.errors import WireError
from npuserve.service.ipc import messages
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.ipc.explanations import Delay, ExplainReply, ExplainRequest, Explanation, KernelComparison
from npuserve.service.ipc.messages import (
    Abort,
    Cancel,
    Finish,
    FlushPrefixCache,
    Hello,
    Load,
    ModelInfo,
    Output,
    Outputs,
    Ready,
    Record,
    Reply,
    Restore,
    Resume,
    Resumed,
    Started,
    Submit,
    Timing,
)
from npuserve.service.ipc.profile_messages import ProfileReply, StartProfile, StopProfile

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CYCLE = 26
VOCABULARY = 300
EOS = 297
"""<eos> of `make_folder`'s tokenizer. The fake generates it only from `script`."""
INFO = ModelInfo(
    family="CountingForCausalLM", vocabulary_size=VOCABULARY, max_model_len=64, dtype="float32", quantization="none",
    kv_cache_dtype="float32", backend="cpu", max_num_seqs=4, max_queue=4, kv_cache_tokens=1024, parameters=7,
    deterministic=True)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}{{ extra | default('') }}")


def make_folder(folder: Path, *, chat: bool = False, tokenizer: bool = True, **generation: object) -> Path:
    """Write a model's folder without weights; return it.

    Ids 0 to 25 are a to z, and 26 to 255 the other bytes. 297 is <eos>; 298 and 299 are two more special tokens.

    chat: add a chat template, for which each front end starts a process.
    tokenizer: add a tokenizer.
    generation: content of generation_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["CountingForCausalLM"], "eos_token_id": EOS}))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer:
        others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(ALPHABET))
        units = [*ALPHABET, *others, *(f"<unused{i}>" for i in range(256, EOS))]
        built = tokenizers.Tokenizer(models.BPE(vocab={unit: i for i, unit in enumerate(units)}, merges=[]))
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.decoder = decoders.ByteLevel()
        built.add_special_tokens(["<eos>", "<s1>", "<s2>"])
        assert built.token_to_id("<eos>") == EOS
        built.save(str(folder / "tokenizer.json"))
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
        template = {"chat_template": CHAT_TEMPLATE} if chat else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(facts | template))
    return folder


class FakeEngine:
    """Fake engine that serves `address` until `die`.

    The embedding of a request is the ids of its prompt, and its score the length of its prompt.

    delay: seconds a token.
    batch: tokens an output.
    script: token ids of every answer, repeated; None: count.
    scripts: token ids of the answer of a sample, by index; `script` for others.
    refuse: error with which every Submit is refused; None: accept.
    refuse_index: index of the only sample that `refuse` refuses; None: all.
    hold: answers wait until it is set.
    records: streams that can be resumed, by resume token.
    profile, no_profile: reply to StopProfile.
    explanation: of the only request that ExplainRequest finds.
    received: all messages, in order.
    """

    def __init__(self, address: str, *, epoch: int = 1, info: ModelInfo = INFO, delay: float = 0.0, batch: int = 1):
        self.epoch = epoch
        self.info = info
        self.delay = delay
        self.batch = batch
        self.script: list[int] | None = None
        self.scripts: dict[int, list[int]] = {}
        self.refuse: WireError | None = None
        self.refuse_index: int | None = None
        self.records: dict[str, Record] = {}
        self.profile: ProfileSummary | None = None
        self.no_profile: WireError | None = None
        self.explanation = Explanation(
            "slow", "alice", 0, False, 1.5, 12, 4, 7, 20, True,
            [Delay("queue", 1.0, 0, "8 requests ran meanwhile"), Delay("decode", 0.5, 20)],
            [KernelComparison("linear", 40, 25e-6, 12.5e-6)])
        self.hold = asyncio.Event()
        self.hold.set()
        self.received: list[messages.ToEngine] = []
        self.address = address
        self._task: asyncio.Task[None] | None = None
        self._live: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._requests: dict[tuple[bytes, int], messages.Request] = {}

    def start(self) -> None:
        self.socket = EngineSocket(self.address)
        self._task = asyncio.ensure_future(self._serve())

    async def die(self) -> None:
        """End at once, like a killed process. `start` may follow, like a restart."""
        if self._task is None:
            return
        tasks = [self._task, *self._live.values()]
        self._task, self._live = None, {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.socket.close()

    @property
    def live(self) -> int:
        return len(self._live)

    def got(self, kind: type) -> list:
        """Return the received messages of one type, in order."""
        return [message for message in self.received if isinstance(message, kind)]

    async def send(self, frontend: bytes, message: messages.ToFrontend) -> None:
        self.socket.send(frontend, message)

    async def _output(self, frontend: bytes, output: Output) -> None:
        await self.send(frontend, Outputs(self.epoch, Load(running=self.live, tokens_per_second=5.0), [output]))

    async def _serve(self) -> None:
        while True:
            for frontend, message in self.socket.receive(0.0):
                if message:
                    self.received.append(message)
                    await self._handle(frontend, message)
            await asyncio.sleep(0.0005)

    async def _handle(self, frontend: bytes, message: messages.ToEngine) -> None:
        match message:
            case Hello():
                await self.send(frontend, Ready(self.epoch, self.info))
            case Submit(key=key, request=request):
                if self.refuse and self.refuse_index in (None, request.index):
                    await self._output(frontend, Output(key, error=self.refuse))
                    return
                await self._accept(frontend, [key])
                self._begin(frontend, key, request)
            case Restore(live=live):
                await self._accept(frontend, [key for key, _ in live])
                for key, record in live:
                    self._begin(frontend, key, record.continuation(accepted=True))
            case Resume(key=key, token=token):
                record = self.records.get(token)
                if record is None:
                    await self._output(frontend, Output(key, error=("StreamNotFound", "resume_token: none", 0.0)))
                    return
                await self.send(frontend, Resumed(self.epoch, key, record))
                if record.finish is None:
                    self._begin(frontend, key, record.continuation(accepted=False))
            case Cancel(key=key, keep=keep):
                if self._end(frontend, key) and keep is not None:
                    finish = self._finish(frontend, key, "stop_string", keep)
                    await self._output(frontend, Output(key, finish=finish))
            case Abort(call=call):
                origins = [o for o in self._live if self._is_aborted(self._requests[o], message)]
                for origin in origins:
                    self._end(*origin)
                    await self._output(origin[0], Output(origin[1], finish=self._finish(*origin, "aborted", 0)))
                await self.send(frontend, Reply(self.epoch, call, int(bool(origins))))
            case ExplainRequest(call=call, request_id=request_id):
                known = [self.explanation] if self.explanation.request_id == request_id else []
                await self.send(frontend, ExplainReply(self.epoch, call, known))
            case FlushPrefixCache(call=call):
                await self.send(frontend, Reply(self.epoch, call, 11))
            case StartProfile(call=call, name=name):
                await self.send(frontend, ProfileReply(self.epoch, call, name or "profile-1"))
            case StopProfile(call=call):
                await self.send(frontend, ProfileReply(self.epoch, call, summary=self.profile, error=self.no_profile))

    @staticmethod
    def _is_aborted(request: messages.Request, abort: Abort) -> bool:
        return (request.request_id == abort.request_id and abort.client in ("", request.client)
                and abort.service in (None, request.service))

    async def _accept(self, frontend: bytes, keys: list[int]) -> None:
        await self.send(frontend, Outputs(self.epoch, Load(running=self.live), [], [], keys))

    def _begin(self, frontend: bytes, key: int, request: messages.Request) -> None:
        self._requests[frontend, key] = request
        self._live[frontend, key] = asyncio.ensure_future(self._answer(frontend, key, request))

    def _end(self, frontend: bytes, key: int) -> bool:
        task = self._live.pop((frontend, key), None)
        if task:
            task.cancel()
        return task is not None

    def _finish(self, frontend: bytes, key: int, reason: messages.FinishReason, generated: int) -> Finish:
        request = self._requests[frontend, key]
        now = time.monotonic()
        timing = Timing(0.0, [now - request.arrival], 0.0, 0.0, 0.0, now)
        is_complete = request.constraint is not None and reason == "eos"
        return Finish(reason, len(request.prompt_ids), 3, generated, timing, is_complete)

    async def _answer(self, frontend: bytes, key: int, request: messages.Request) -> None:
        """Send the answer, with one Output each `batch` tokens."""
        await self.hold.wait()
        started = [Started(key, 3)]
        await self.send(frontend, Outputs(self.epoch, Load(running=self.live), [], started))
        if request.pooling is not None:
            await self._pool(frontend, key, request)
            return
        last = (request.prompt_ids + request.output_ids)[-1]
        sampling = request.sampling
        prompt_reports = None
        if sampling.prompt_logprobs is not None:
            prompt_reports = [self._report(token, sampling.prompt_logprobs) for token in request.prompt_ids[1:]]
        ids: list[int] = []
        script = self.scripts.get(request.index, self.script)
        made = 0
        for made in range(len(request.output_ids) + 1, request.max_tokens + 1):
            if self.delay:
                await asyncio.sleep(self.delay)
            last = script[(made - 1) % len(script)] if script else (last + 1) % CYCLE
            ids.append(last)
            reason: messages.FinishReason | None = None
            if made > sampling.min_tokens and last in request.eos_token_ids:
                reason = "eos"
            elif made > sampling.min_tokens and last in request.stop_token_ids:
                reason = "stop_token"
            elif made == request.max_tokens:
                reason = "length"
            if not reason and len(ids) < self.batch:
                continue
            reports = None if sampling.logprobs is None else [self._report(token, sampling.logprobs) for token in ids]
            if reason:
                del self._live[frontend, key]
            finish = self._finish(frontend, key, reason, made) if reason else None
            await self._output(frontend, Output(key, ids, finish, None, reports, prompt_reports))
            ids, prompt_reports = [], None
            if reason:
                return

    async def _pool(self, frontend: bytes, key: int, request: messages.Request) -> None:
        """Send the ids of the prompt as an embedding, or the length of the prompt as a score."""
        await asyncio.sleep(self.delay)
        values = request.prompt_ids if request.pooling and request.pooling.dimensions else [len(request.prompt_ids)]
        del self._live[frontend, key]
        finish = self._finish(frontend, key, "pooled", 0)
        await self._output(frontend, Output(key, [], finish, values=array("f", values).tobytes()))

    @staticmethod
    def _report(token: int, top: int) -> TokenLogprobs:
        return TokenLogprobs(token, -0.5, 1, [(token + i) % CYCLE for i in range(top)], [-0.5 - i for i in range(top)])


@contextlib.asynccontextmanager
async def engine(started: bool = True, **options: object) -> AsyncIterator[FakeEngine]:
    """Run a fake engine at its own address, in a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="npu") as folder:
        fake = FakeEngine(f"{folder}/e", **options)  # type: ignore[arg-type]
        if started:
            fake.start()
        try:
            yield fake
        finally:
            await fake.die()


async def until(true: object, seconds: float = 10.0) -> None:
    """Wait until `true()` returns a true value, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
