"""`LLM` with the built-in model, beside the server's own answers, and what it refuses."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from npuserve import LLM, EngineArgs, SamplingParams
from npuserve.client import Client, ClientError, InvalidRequest
from npuserve.client.outputs import Logprob
from npuserve.npu.storyteller import FOLDER as BUILT_IN
from tests.e2e.server import KV_CACHE_MEMORY
from tests.support.models import random_model
from tests.support.pooling import saved_embedder, saved_reranker

GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Model whose default parameters are greedy, shared by the tests."""
    folder = shutil.copytree(BUILT_IN, tmp_path_factory.mktemp("llm") / "model")
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_sample": True, "top_k": 1}))
    with LLM(str(folder), max_model_len=256, kv_cache_memory=KV_CACHE_MEMORY) as model:
        yield model


def private_servers() -> list[str]:
    """Return the process ids of this process's private servers."""
    children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()
    return [child for child in children if b"--private" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_generate_returns_answers_in_the_order_of_the_prompts(llm: LLM):
    prompts = [f"Once upon a time there were {number} dogs" for number in range(40)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs[::13]:
        (again,) = llm.generate(output.prompt, GREEDY, use_tqdm=False)
        assert again.outputs == output.outputs
    assert all(output.outputs[0].finish_reason == "length" and output.finished for output in outputs)


def test_generate_accepts_the_three_forms_of_a_prompt(llm: LLM):
    (text,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert text.prompt_token_ids
    (ids,) = llm.generate(text.prompt_token_ids, GREEDY, use_tqdm=False)
    (mapping,) = llm.generate({"prompt_token_ids": text.prompt_token_ids}, GREEDY, use_tqdm=False)
    assert ids.outputs == mapping.outputs == text.outputs
    assert (ids.prompt, ids.prompt_token_ids) == (None, text.prompt_token_ids)
    with pytest.raises(ValueError, match=r"^prompt: must have the key prompt or prompt_token_ids, got 'text'$"):
        llm.generate({"text": "Once"}, use_tqdm=False)


def test_each_prompt_may_have_its_own_parameters(llm: LLM):
    short = SamplingParams(max_tokens=3, temperature=0, n=2, logprobs=1, prompt_logprobs=0)
    long, samples = llm.generate(["Once", "Once"], [GREEDY, short], use_tqdm=False)
    assert len(long.outputs[0].token_ids) == 12
    assert [output.token_ids for output in samples.outputs] == [long.outputs[0].token_ids[:3]] * 2
    position = samples.outputs[0].logprobs[0]  # type: ignore[index]
    token = samples.outputs[0].token_ids[0]
    assert isinstance(position[token], Logprob)
    assert position[token].rank == 1
    assert samples.outputs[0].cumulative_logprob < 0  # type: ignore[operator]
    assert samples.prompt_logprobs[0] is None  # type: ignore[index]
    assert len(samples.prompt_logprobs) == len(samples.prompt_token_ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^sampling_params: must be one, or one for each of 1 prompts, got 2$"):
        llm.generate(["Once"], [GREEDY, GREEDY], use_tqdm=False)


def test_stop_string_is_the_stop_reason(llm: LLM):
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=100, stop=["girl"]),
                             use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "girl")
    assert not output.outputs[0].text.endswith("girl")


def test_invalid_parameter_names_its_field(llm: LLM):
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate(["Once"] * 5, SamplingParams(temperature=-1), use_tqdm=False)


def test_chat_without_a_template_is_refused_by_the_server(llm: LLM):
    with pytest.raises(Exception, match="chat template"):
        llm.chat([{"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False)


def test_private_server_refuses_calls_without_its_key(llm: LLM):
    with Client(llm._server.address, patience=0) as stranger, pytest.raises(Exception, match="API key") as refused:
        stranger.model_info()
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_default_parameters_are_those_of_the_model(llm: LLM):
    parameters = llm.get_default_sampling_params()
    parameters.max_tokens = 12
    defaults = llm.generate(["Once upon a time"] * 3, parameters, use_tqdm=False)
    without = llm.generate(["Once upon a time"] * 3, use_tqdm=False)
    sampled = llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=60), use_tqdm=False)
    (greedy,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert {output.outputs[0].text for output in defaults} == {greedy.outputs[0].text}
    assert all(output.outputs[0].text.startswith(greedy.outputs[0].text) for output in without)
    assert len({output.outputs[0].text for output in sampled}) > 1


@pytest.mark.slow
def test_death_of_the_private_server_ends_calls_with_its_last_messages(llm: LLM):
    """Last test of the shared server."""
    llm._server._lines.append("the last message")
    killer = threading.Timer(0.5, llm._server._process.kill)
    killer.start()
    with pytest.raises(ValueError, match=r"^the private server ended: (.*\n)*the last message$"):
        llm.generate(["Once upon a time"] * 5_000, GREEDY, use_tqdm=False)
    killer.join()
    llm.close()
    llm._server._reader.join(60)
    process = llm._server._process
    assert [bool(file and file.closed) for file in (process.stdin, process.stdout, process.stderr)] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "reason"), [
    ({"gpu_memory_utilization": 0.9}, "--gpu-memory-utilization=0.9; here it is --kv-cache-memory"),
    pytest.param({"model": "/no/folder"}, "model: there is no folder /no/folder", marks=pytest.mark.full),
    pytest.param({"max_model_len": -3}, "max_model_len: -3 is not in", marks=pytest.mark.full),
    ({"port": 50051}, "--port: a private server chooses it; remove it"),
    ({"tls_cert": "server.pem", "tls_key": "server.key"}, "--tls-cert: a private server chooses it; remove it"),
])
def test_setting_that_the_server_refuses_is_a_value_error(settings: dict[str, Any], reason: str):
    before = private_servers()
    with pytest.raises(ValueError, match=r"^the private server ended: ") as refused:
        LLM(**settings)
    assert reason in str(refused.value)
    assert private_servers() == before


@pytest.mark.full
def test_model_that_cannot_be_loaded_is_a_value_error(tmp_path: Path):
    before = private_servers()
    with pytest.raises(ValueError, match=r"^the private server ended: npuserve: model: .* has no config.json"):
        LLM(str(tmp_path))
    assert private_servers() == before


KILLED = """
import os, signal
from npuserve import LLM
llm = LLM()
print(llm._server._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_private_server_ends_when_its_process_is_killed(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, cwd=tmp_path)
    status = Path(f"/proc/{int(done.stdout)}/cmdline")
    with contextlib.suppress(FileNotFoundError):
        while status.read_bytes():  # empty once it has ended, until its new parent has waited for it
            time.sleep(0.05)  # the test's time limit ends the wait


@pytest.mark.full
def test_serve_private_prints_its_address_and_key_once_it_listens():
    with subprocess.Popen([sys.executable, "-m", "npuserve.cli", "serve", "--private", "--log-level", "error"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env=os.environ | {"NPUSERVE_PORT": "1"}) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        facts = json.loads(server.stdout.readline())
        with Client(facts["address"], api_key=facts["api_key"]) as client:
            assert client.model_info().name
        server.stdin.close()
        assert server.wait() == 0


@pytest.mark.full
def test_serve_private_with_a_broken_model_exits_with_2_and_one_message(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-m", "npuserve.cli", "serve", "--private", str(tmp_path)], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stderr is not None
        messages = server.stderr.read()  # stdin is open until the server has ended
        assert server.wait() == 2, messages
    assert messages.splitlines()[-1].startswith("npuserve: model: ")


@pytest.mark.full
def test_embed_and_score_equal_the_clients_answers(tmp_path: Path):
    model = random_model("qwen3", vocab_size=768, max_position_embeddings=256, hidden_size=64, num_hidden_layers=2)
    (tmp_path / "embedder").mkdir()
    (tmp_path / "reranker").mkdir()
    texts = ["Once upon a time", "The dog", "A girl"]
    with LLM(str(saved_embedder(model, tmp_path / "embedder"))) as llm:
        outputs = llm.embed([*texts, {"prompt_token_ids": [5, 6]}], use_tqdm=False)
        assert [output.prompt for output in outputs] == [*texts, None]
        assert outputs[3].prompt_token_ids == [5, 6]
        assert [output.outputs.embedding for output in outputs[:3]] == [
            list(llm._client.embed(text).values) for text in texts]
        assert len({tuple(output.outputs.embedding) for output in outputs}) == 4
        assert outputs[0].outputs.hidden_size == 64
        with pytest.raises(ClientError, match="embed"):
            llm.generate("Once", use_tqdm=False)
    with LLM(str(saved_reranker(model, tmp_path / "reranker", "Judge it"))) as llm:
        scores = [output.outputs.score for output in llm.score("dog", texts, use_tqdm=False)]
        assert scores == list(llm._client.rank("dog", texts).scores)
        (pair, other) = llm.score(["dog", "girl"], texts[1:], use_tqdm=False)
        assert [pair.outputs.score] == scores[1:2]
        assert other.outputs.score == llm._client.rank("girl", texts[2:]).scores[0]
        with pytest.raises(ValueError, match=r"^queries: must be one, or one for each of 3 documents, got 2$"):
            llm.score(["dog", "girl"], texts)


def test_engine_args_are_the_settings_of_llm():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model="folder")
    assert vars(parser.parse_args([])) == {"model": "folder"}
    arguments = vars(parser.parse_args(["--model", "other", "--max-model-len", "128", "--no-prefix-cache"]))
    assert arguments == {"model": "other", "max_model_len": "128", "prefix_cache": False}
    with pytest.raises(ValueError, match="there is no folder /no/folder"):
        LLM(**arguments | {"model": "/no/folder"})


@pytest.mark.parametrize("flag", ["--port=1", "--api-keys=keys.toml", "--tls-cert=server.pem"])
def test_engine_args_have_no_flag_for_what_a_private_server_chooses(flag: str):
    with pytest.raises(SystemExit):
        EngineArgs.add_cli_args(argparse.ArgumentParser(allow_abbrev=False)).parse_args([flag])


@pytest.mark.filterwarnings("error")
def test_engine_args_are_added_to_a_group_without_nested_groups():
    parser = argparse.ArgumentParser()
    group = EngineArgs.add_cli_args(parser.add_argument_group("Engine"))
    assert "--max-model-len" in {flag for action in group._group_actions for flag in action.option_strings}
    assert vars(parser.parse_args(["--max-model-len", "128"])) == {"max_model_len": "128"}


@pytest.mark.full
def test_private_server_ends_with_the_last_reference_to_its_llm():
    """By default test_private_server_ends_when_its_process_is_killed."""
    before = private_servers()
    model = LLM()
    assert len(private_servers()) == len(before) + 1
    del model
    gc.collect()
    assert private_servers() == before
