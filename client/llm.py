"""Generation in one process, without a server that somebody starts: `LLM` starts a private one.

    from npuserve import LLM, SamplingParams

    with LLM("Qwen/Qwen3-0.6B") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

The calls and results are named as those of vLLM's offline API. The private server is a child process that accepts calls
with a random key on 127.0.0.1, and ends with this process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from npuserve.client.rpc_errors import ClientError
from npuserve.client.sampling_params import SamplingParams
from npuserve.client.sync import Client
from npuserve.common.answer import value_name
from npuserve.v1 import generate_pb2 as pb

START_SECONDS = 3600.0
"""Maximum time in which the private server loads the model, a download included."""
STOP_SECONDS = 30.0
"""Maximum time in which the private server ends before it is killed."""
MAX_ERROR_LINES = 20
"""Lines of the server's messages that an error quotes."""
FINISH_REASONS = {"EOS": "stop", "STOP_TOKEN": "stop", "STOP_STRING": "stop", "LENGTH": "length"}
"""vLLM's names of finish reasons. Others are "abort"."""

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with the key `prompt` or `prompt_token_ids`."""
Chat = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token. rank: 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of an answer.

    logprobs: by position, token id -> Logprob; None if they were not requested.
    stop_reason: stop string or stop token that ended the answer; None for another end.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: str | int | None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the answer's tokens; None if they were not requested."""
        if self.logprobs is None:
            return None
        return sum(position[token].logprob for position, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    """Answer to one prompt.

    prompt: text of the prompt; None for token ids or a chat.
    prompt_token_ids: None for a chat, whose template the server applies.
    prompt_logprobs: by position, None for the first one; None if they were not requested.
    """

    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = field(default=True, init=False)


class LLM:
    """Language model that a private server computes, for scripts that need answers and no server.

    Threads can share it. `close`, or the end of its `with`, ends the server; so does the end of the process.

    model: folder in Hugging Face format, or a name on its hub; "" for the built-in model.
    settings: settings of `npuserve serve` by name, with underscores, such as max_model_len or tensor_parallel_size.

    Raises ImportError if the server is not installed, ValueError with the server's reason if it does not start.
    """

    def __init__(self, model: str = "", **settings: Any):
        if importlib.util.find_spec("npuserve.cli") is None:
            raise ImportError("LLM needs the server: pip install npuserve (npuserve-client is the client alone)")
        settings.setdefault("log_level", "warning")
        self._server = _PrivateServer([*([model] if model else []), *_flags(settings)])
        self._client = Client(self._server.address, api_key=self._server.api_key, patience=START_SECONDS)
        with self._server.explained_failure():
            self._concurrent = self._client.model_info().max_num_seqs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the answers, in the order of the prompts.

        prompts: one prompt or several.
        sampling_params: for all prompts, or one for each; None for SamplingParams().
        use_tqdm: whether to show a progress bar.

        Raises ClientError if the server refuses a prompt.
        """
        several: Any = [prompts] if _is_prompt(prompts) else prompts
        return self._run([_without_mapping(prompt) for prompt in several], sampling_params, {}, use_tqdm)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the answers to one chat or several, each a list of messages. Other arguments: see `generate`.

        tools: functions that the model may call, as in the OpenAI API.
        chat_template_kwargs: arguments of the chat template, such as enable_thinking.
        """
        chats = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        options = {"tools": tools, "template_args": chat_template_kwargs}
        return self._run(chats, sampling_params, options, use_tqdm)

    def close(self) -> None:
        """End the private server."""
        self._client.close()
        self._server.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(
        self, prompts: list[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: dict[str, Any], use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            parameters = [sampling_params or SamplingParams()] * len(prompts)
        else:
            parameters = list(sampling_params)
        if len(parameters) != len(prompts):
            raise ValueError(f"sampling_params: must be one, or one for each of {len(prompts)} prompts, "
                             f"got {len(parameters)}")
        # Twice the number that runs, so that the server always has the next ones.
        with ThreadPoolExecutor(2 * self._concurrent) as threads, _progress_bar(len(prompts), use_tqdm) as progress:
            running = [threads.submit(self._answer, prompt, of_prompt, options)
                       for prompt, of_prompt in zip(prompts, parameters, strict=True)]
            try:
                for answered in as_completed(running):
                    answered.result()
                    progress.update()
            except BaseException:  # also Ctrl-C
                threads.shutdown(wait=False, cancel_futures=True)
                raise
            return [answered.result() for answered in running]

    def _answer(self, prompt: Any, parameters: SamplingParams, options: dict[str, Any]) -> RequestOutput:
        prompt_ids = None if not isinstance(prompt, str) else list(self._client.tokenize(prompt).token_ids)
        if _is_token_ids(prompt):
            prompt_ids = list(prompt)
        answer = self._client.generate(
            prompt, **parameters.options(), **options, return_token_ids=True)
        samples: list[Any] = list(answer.samples) or [answer]
        return RequestOutput(
            prompt if isinstance(prompt, str) else None, prompt_ids,
            [_completion(index, sample, parameters.logprobs is not None) for index, sample in enumerate(samples)],
            None if parameters.prompt_logprobs is None else
            [_position(position) if position.top or index else None
             for index, position in enumerate(answer.prompt_logprobs)],
            samples[0].finish.usage.cached_tokens)


class _PrivateServer:
    """Child process `npuserve serve --private`.

    arguments: its command line after `--private`.
    address, api_key: of its gRPC server.

    Raises ValueError with its last error message if it ends before it listens.
    """

    def __init__(self, arguments: list[str]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "npuserve.cli", "serve", "--private", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        self._lines: deque[str] = deque(maxlen=MAX_ERROR_LINES)
        is_listening = threading.Event()
        # Without a reference to this object, which would otherwise live as long as the process.
        self._reader = threading.Thread(
            target=_forward_stderr, args=(self._process, self._lines, is_listening), daemon=True)
        self._reader.start()
        self._finalizer = weakref.finalize(self, _stop_process, self._process)
        assert self._process.stdout is not None
        with self.explained_failure():
            server = json.loads(self._process.stdout.readline())
            self.address: str = server["address"]
            self.api_key: str = server["api_key"]
        is_listening.set()

    def stop(self) -> None:
        """End the process. Further calls do nothing."""
        self._finalizer()

    @contextlib.contextmanager
    def explained_failure(self) -> Iterator[None]:
        """Raise ValueError with the server's messages if the body fails because the server has ended."""
        try:
            yield
        except (ValueError, ClientError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            if self._process.poll() is None:
                raise
            self._reader.join(STOP_SECONDS)
            raise ValueError("the private server ended: " + "\n".join(self._lines)) from None


def _forward_stderr(process: subprocess.Popen[str], lines: deque[str], is_listening: threading.Event) -> None:
    """Keep the server's last messages, and write those after it listens to stderr. An error quotes earlier ones."""
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line.rstrip())
        if is_listening.is_set():
            sys.stderr.write(line)


def _stop_process(process: subprocess.Popen[str]) -> None:
    """End the private server by the end of its stdin."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the command line of settings. None leaves a setting out."""
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}={value}"


def _is_token_ids(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int)


def _is_prompt(prompts: object) -> bool:
    return isinstance(prompts, str | Mapping) or _is_token_ids(prompts)


def _without_mapping(prompt: Prompt) -> str | Sequence[int]:
    """Return the text or the token ids of a prompt. Raise ValueError for a mapping without them."""
    if not isinstance(prompt, Mapping):
        return prompt
    for key in ("prompt_token_ids", "prompt"):
        if key in prompt:
            value: str | Sequence[int] = prompt[key]
            return value
    raise ValueError(f"prompt: must have the key prompt or prompt_token_ids, got {', '.join(map(repr, prompt))}")


def _completion(index: int, sample: pb.GenerateResponse | pb.Sample, has_logprobs: bool) -> CompletionOutput:
    finish = sample.finish
    stop_reason: str | int | None = None
    if finish.reason == pb.FINISH_REASON_STOP_STRING:
        stop_reason = finish.matched_stop
    elif finish.reason == pb.FINISH_REASON_STOP_TOKEN:
        stop_reason = finish.matched_stop_token_id
    reason = value_name(pb.FinishReason, finish.reason, "FINISH_REASON_")
    logprobs = [_position(position) for position in sample.logprobs] if has_logprobs else None
    return CompletionOutput(
        index, sample.text, list(sample.token_ids), logprobs, FINISH_REASONS.get(reason, "abort"), stop_reason)


def _position(position: pb.PositionLogprobs) -> dict[int, Logprob]:
    """Return the log-probabilities at one position: of its token, then of the most likely ones."""
    return {token.token_id: Logprob(token.logprob, token.rank, token.text)
            for token in (position.chosen, *position.top)}


def _progress_bar(prompts: int, is_shown: bool) -> Any:
    from tqdm import tqdm  # comes with the server, whose huggingface_hub needs it

    return tqdm(total=prompts, desc="Prompts", unit="prompt", disable=not is_shown)
