"""Generation in one process, without a server that somebody starts: `LLM` starts a private one.

    from npuserve import LLM, SamplingParams

    with LLM("Qwen/Qwen3-0.6B") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

The calls and results are named as those of vLLM's offline API. The private server is a child process that accepts calls
with a random key on 127.0.0.1, and ends with this process.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from npuserve.client.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    completion,
    position_logprobs,
)
from npuserve.client.private_server import PrivateServer
from npuserve.client.sampling_params import SamplingParams
from npuserve.client.sync import Client

START_SECONDS = 3600.0
"""Maximum time in which the private server loads the model, a download included."""

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with the key `prompt` or `prompt_token_ids`."""
Chat = Sequence[Mapping[str, Any]]
Output = TypeVar("Output")


class LLM:
    """Language model that a private server computes, for scripts that need answers and no server.

    Threads can share it. `close`, or the end of its `with`, ends the server; so does the end of the process.

    model: folder in Hugging Face format, or a name on its hub; "" for the built-in model.
    settings: settings of `npuserve serve` by name, with underscores, such as max_model_len or tensor_parallel_size.
        Those of addresses, TLS and keys are refused.

    Raises ImportError if the server is not installed, ValueError with the server's reason if it does not start.
    """

    def __init__(self, model: str = "", **settings: Any):
        if importlib.util.find_spec("npuserve.cli") is None:
            raise ImportError("LLM needs the server: `pip install ./client .` in a clone of npuserve "
                              "(npuserve-client is the client alone)")
        settings.setdefault("log_level", "warning")
        self._server = PrivateServer([*([model] if model else []), *_flags(settings)])
        self._client = Client(self._server.address, api_key=self._server.api_key, patience=START_SECONDS)
        self._server.on_end(self._client.close)  # no call waits for a server that has ended
        with self._server.explained_failure():
            self._concurrent = self._client.model_info().max_num_seqs

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls without any. None stands for a value of the model's generation_config.json."""
        return SamplingParams(temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the answers, in the order of the prompts.

        prompts: one prompt or several.
        sampling_params: for all prompts, or one for each; None for `get_default_sampling_params`.
        use_tqdm: whether to show a progress bar.

        Raises ClientError if the server refuses a prompt.
        """
        return self._generate(_contents(prompts), sampling_params, {}, use_tqdm)

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
        return self._generate(chats, sampling_params, options, use_tqdm)

    def embed(self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """Return the embeddings, in the order of the prompts. Needs an embedding model. Arguments: see `generate`."""
        def embed(content: str | Sequence[int]) -> EmbeddingRequestOutput:
            answer = self._client.embed(content)
            text, token_ids = (content, None) if isinstance(content, str) else (None, list(content))
            return EmbeddingRequestOutput(
                text, token_ids, EmbeddingOutput(list(answer.values)), answer.usage.cached_tokens)

        return self._map(embed, [(content,) for content in _contents(prompts)], use_tqdm)

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """Return the relevance of each document: to the query, or to its own of as many queries. Needs a reranker."""
        queries, documents = (
            [texts] if isinstance(texts, str) else list(texts) for texts in (queries, documents))
        if len(queries) not in (1, len(documents)):
            raise ValueError(f"queries: must be one, or one for each of {len(documents)} documents, "
                             f"got {len(queries)}")
        if len(queries) == 1:
            queries *= len(documents)

        def score(query: str, document: str) -> ScoringRequestOutput:
            answer = self._client.rank(query, [document])
            return ScoringRequestOutput(ScoringOutput(answer.scores[0]), answer.usage.cached_tokens)

        return self._map(score, list(zip(queries, documents, strict=True)), use_tqdm)

    def close(self) -> None:
        """End the private server."""
        self._client.close()
        self._server.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _generate(
        self, prompts: list[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: dict[str, Any], use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            parameters = [sampling_params or self.get_default_sampling_params()] * len(prompts)
        else:
            parameters = list(sampling_params)
        if len(parameters) != len(prompts):
            raise ValueError(f"sampling_params: must be one, or one for each of {len(prompts)} prompts, "
                             f"got {len(parameters)}")
        return self._map(self._answer, list(zip(prompts, parameters, itertools.repeat(options))), use_tqdm)

    def _map(self, call: Callable[..., Output], arguments: Sequence[tuple[Any, ...]], use_tqdm: bool) -> list[Output]:
        """Return the results of calls of the server, in the order of their arguments."""
        # Twice the number that runs, so that the server always has the next ones.
        with (self._server.explained_failure(), ThreadPoolExecutor(2 * self._concurrent) as threads,
              _progress_bar(len(arguments), use_tqdm) as progress):
            running = [threads.submit(call, *of_call) for of_call in arguments]
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
            [completion(index, sample, parameters.logprobs is not None) for index, sample in enumerate(samples)],
            None if parameters.prompt_logprobs is None else
            [position_logprobs(position) if position.top or index else None
             for index, position in enumerate(answer.prompt_logprobs)],
            samples[0].finish.usage.cached_tokens)


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


def _contents(prompts: Prompt | Sequence[Prompt]) -> list[str | Sequence[int]]:
    """Return the text or the token ids of one prompt or several. Raise ValueError for a mapping without them."""
    several: Any = [prompts] if isinstance(prompts, str | Mapping) or _is_token_ids(prompts) else prompts
    return [_content(prompt) for prompt in several]


def _content(prompt: Prompt) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    for key in ("prompt_token_ids", "prompt"):
        if key in prompt:
            value: str | Sequence[int] = prompt[key]
            return value
    raise ValueError(f"prompt: must have the key prompt or prompt_token_ids, got {', '.join(map(repr, prompt))}")


def _progress_bar(calls: int, is_shown: bool) -> Any:
    from tqdm import tqdm  # comes with the server, whose huggingface_hub needs it

    return tqdm(total=calls, desc="Prompts", unit="prompt", disable=not is_shown)
