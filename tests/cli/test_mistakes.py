"""Plausible mistakes on the command line. Each message names what is wrong, what is allowed, and the next step.

Each case is a command line, the exit code, and words that the message must have. `{name}` is the port of a server of
the module. The cases run in the folder that `folder` fills.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socketserver
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from grpc_status import rpc_status

from npuserve.cli.main import main
from npuserve.service import errors
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc
from tests.cli.test_metrics_reader import answering
from tests.support.command import npuserve

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 8, "hidden_size": 64, "intermediate_size": 64,
          "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MODELS = {
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 8}},
    "bnb": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "w4a8": {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": False}, "input_activations": {"num_bits": 8}}},
        "format": "int-quantized"}},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "gemma": {"architectures": ["Gemma3ForConditionalGeneration"]},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4},
    "pickled": {},
}
FILES = {
    "lora/adapter_config.json": "{}", "lora/adapter_model.safetensors": "", "q4/qwen3-q4.gguf": "GGUF",
    "model.gguf": "GGUF", "pickled/pytorch_model.bin": "", "original/params.json": "{}", "empty/README.md": "",
    "a.yaml": "port: 50051\n", "foreign.toml": "gpu_memory_utilization = 0.9\n", "dashes.toml": "max-num-seqs = 4\n",
    "table.toml": "[server]\nport = 1\n", "half.toml": "port =\n", "text.toml": 'port = "high"\n',
    "key": "", "keys": "one\ntwo\n", "schema.json": "{", "tools.json": "{}",
}
REFUSALS = {
    "key": errors.Unauthenticated("an API key is needed in the metadata: authorization: Bearer KEY"),
    "right": errors.PermissionDenied("AdminService needs an API key with the admin right"),
    "range": errors.InvalidField("stopping.max_tokens", "must be in [1, 63], got 0"),
}


class Refusing(inference_service_pb2_grpc.InferenceServiceServicer):
    """Servicer that refuses each prompt with the error that it names."""

    def StreamGenerate(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.StreamGenerateResponse]:
        context.abort_with_status(rpc_status.to_status(errors.to_status(REFUSALS[request.text])))
        yield generate_pb2.StreamGenerateResponse()


class Greeting(socketserver.BaseRequestHandler):
    """Handler of a server that speaks another protocol."""

    def handle(self) -> None:
        self.request.sendall(b"SSH-2.0-something\r\n")


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(Refusing(), server)
    by_name = {"grpc": server.add_insecure_port("127.0.0.1:0")}
    server.start()
    with contextlib.ExitStack() as stack:
        for name, body in (("metrics", "npuserve_requests_running 0\n"), ("web", "hello")):
            by_name[name] = urlsplit(stack.enter_context(answering(200, body))).port or 0
        other = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Greeting))
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        stack.callback(other.shutdown)
        by_name["ssh"] = other.server_address[1]
        yield by_name
    server.stop(None).wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    models = {f"{name}/config.json": json.dumps(CONFIG | changed) for name, changed in MODELS.items()}
    for name, text in (FILES | models).items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text)
    return made


FLAGS_OF_OTHERS = [
    ("serve --model Qwen/Qwen3-0.6B", 2, "--model; here it is MODEL without a flag: npuserve serve MODEL;"),
    ("serve --gpu-memory-utilization 0.9", 2, "--gpu-memory-utilization; here it is --kv-cache-memory: the size of"),
    ("serve --served-model-name x", 2, "here it is --served-name, one name;"),
    ("serve --chat-template x.jinja", 2, "there is none here: edit the model folder's chat_template.jinja"),
    ("serve --enforce-eager", 2, "here it is --capture off;"),
    ("serve --trust-remote-code", 2, "there is none here: code of a checkpoint is never run;"),
    ("serve --enable-lora", 2, "there is none here: merge the adapter into its model"),
    ("serve --quantization awq", 2, "npuserve quantize makes W8A8, W4A16 and W4A8;"),
    ("serve --api-key secret", 2, "here it is --api-keys: a file of keys, which npuserve keys add FILE NAME writes;"),
    ("serve --enable_prefix_caching", 2, "here it is --prefix-cache, on by default; --no-prefix-cache turns it off"),
    ("serve --model-id Qwen/Qwen3-0.6B", 2, "here it is MODEL without a flag"),
    ("serve --max-total-tokens 4096", 2, "here it is --max-model-len;"),
    ("serve --num-shard 2", 2, "here it is --tensor-parallel-size;"),
    ("serve --mem-fraction-static 0.8", 2, "here it is --kv-cache-memory"),
    ("serve -m model.gguf -c 4096", 2,
     "; -m: here it is MODEL without a flag: npuserve serve MODEL; -c: here it is --max-"),
    ("serve --ctx-size=4096", 2, "--ctx-size=4096; here it is --max-model-len;"),
    ("serve --max_num_seqs 8", 2, "did you mean --max-num-seqs?"),
    ("generate x --model y", 2, "--model y; leave it out: a server has one model;"),
    ("generate x --host 127.0.0.1 --port 50051", 2, "; --host: here it is --target HOST:PORT; --port: here it is"),
    ("generate x --max-new-tokens 4", 2, "here it is --max-tokens N;"),
    ("generate x --api-key abc", 2, "here it is --api-key-file FILE"),
    ("generate x --stream", 2, "leave it out: answers are always streamed;"),
    ("generate -p hello", 2, "-p; here it is PROMPT without a flag: npuserve generate PROMPT;"),
    ("generate x -k", 2, "here it is --tls-ca FILE"),
    ("top --port 9090", 2, "here it is --target HOST:PORT;"),
]
ORDER = [
    ("--model x serve", 2, "--model; a command stands before its flags; see npuserve --help"),
    ("-v", 2, "did you mean --version?"),
    ("version", 2, "did you mean --version?"),
    ("start", 2, "did you mean serve?"),
    ("genrate x", 2, "did you mean generate?"),
    ("bench latency", 2, "argument WHAT: invalid choice: 'latency' (choose from"),
    ("serve a b", 2, "unrecognized arguments: b; MODEL is one argument: quote it if it has spaces;"),
    ("generate Once upon a time", 2, "upon a time; PROMPT is one argument: quote it if it has spaces;"),
    ("generate", 2, "required: PROMPT"),
    ("keys", 2, "required: {{add,list,remove}}, FILE"),
    ("keys add clients", 2, "NAME is missing: npuserve keys add FILE NAME"),
]
VALUES = [
    ("serve --port 70000", 2, "port: 70000 is not in [0, 65535] (from --port)"),
    ("serve --port grpc", 2, "port: 'grpc' is not a whole number in [0, 65535] (from --port)"),
    ("serve --port 9090", 2, "metrics_port: 9090 is already the port of gRPC; 0 takes a free one (from --port)"),
    ("serve --host localhost:50051", 2, "host: 'localhost:50051' has a port; give host localhost and port 50051"),
    ("serve --host", 2, "--host: expected one argument"),
    ("serve --device gpu", 2, "is not one of auto, cpu, npu, cuda (from --device); did you mean cuda?"),
    ("serve --dtype half", 2, "did you mean float16?"),
    ("serve --log-level INFO", 2, "did you mean info?"),
    ("serve --kv-cache-memory 90%", 2, "'90%' is not a size such as 4GiB (from --kv-cache-memory)"),
    ("serve --kv-cache-dtype fp8_e4m3", 2, "did you mean fp8?"),
    ("serve --max-model-len 32k", 2, "'32k' is not a whole number in [0, 16777216]"),
    ("serve --block-size 24", 2, "24 is not 0 or a power of two up to 1024"),
    ("serve --drain-seconds 30s", 2, "'30s' is not a number in [0, 86400]"),
    ("serve --prefix-cache off", 2, "'off' is no model. A switch takes no value"),
    ("serve --no-prefix-cache=true", 2, "takes no value, got 'true'"),
    ("generate x --max-tokens 1.5", 2, "--max-tokens: must be a whole number, got '1.5'"),
    ("generate x --temperature hot", 2, "--temperature: must be a number, got 'hot'"),
    ("generate x --n 17", 2, "--n: must be in [1, 16], got '17'"),
    ("generate range --target 127.0.0.1:{grpc} --max-tokens 0", 1, "stopping.max_tokens: must be in [1, 63], got 0"),
    ("generate x --system hi", 2, "--system: is for --chat only"),
    ("generate x --regex a --json-object", 2, "--json-object: not allowed with argument --regex"),
    ("top --interval 0", 2, "--interval: must be in [0.1, 3600], got '0'"),
    ("bench kernels --device npu", 2, "--device: invalid choice: 'npu' (choose from"),
]
FILES_OF_SETTINGS = [
    ("serve --config absent.toml", 2, "absent.toml: cannot be read: No such file or directory"),
    ("serve --config a.yaml", 2, "a.yaml: not a TOML file: Expected '=' after a key"),
    ("serve --config half.toml", 2, "half.toml: not a TOML file: Invalid value (at line 1"),
    ("serve --config foreign.toml", 2,
     "foreign.toml: gpu_memory_utilization: no such setting; here it is kv_cache_memory"),
    ("serve --config dashes.toml", 2, "max-num-seqs: no such setting; did you mean max_num_seqs?"),
    ("serve --config table.toml", 2, "server: no such setting; settings stand in no table: remove the line [server]"),
    ("serve --config text.toml", 2, "'high' is not a whole number in [0, 65535] (from text.toml:port)"),
]
SECRETS = [
    ("serve --tls-cert cert.pem", 2, "tls_key: is missing; tls_cert needs it (from --tls-cert)"),
    ("serve --tls-client-ca ca.pem", 2, "clients can only be authenticated with tls_cert and tls_key"),
    ("keys list absent", 2, "absent: No such file or directory; npuserve keys add FILE NAME makes it"),
    ("keys add clients alice --max-requests -1", 2, "max_requests: must be a whole number in [0, 1048576]"),
    ("generate x --api-key-file absent", 1, "--api-key-file: absent: No such file or directory"),
    ("generate x --api-key-file key", 1, "--api-key-file: key: is empty; it must hold the line that npuserve keys add"),
    ("generate x --api-key-file keys", 1, "--api-key-file: keys: holds more than one key"),
    ("generate x --tls-cert cert.pem", 1, "--tls-cert needs --tls-key"),
    ("generate x --tls-ca absent.pem", 1, "--tls-ca: absent.pem: No such file or directory"),
    ("generate key --target 127.0.0.1:{grpc}", 1, "(UNAUTHENTICATED); give the key's file with --api-key-file"),
    ("generate right --target 127.0.0.1:{grpc}", 1,
     "keys add FILE NAME --admin made, or with --tls-cert and --tls-key"),
]
SERVERS = [
    ("generate x --target 127.0.0.1:1", 1,
     "no server answers there (Connection refused); start one with: npuserve serve"),
    ("generate x --target 127.0.0.1:{metrics}", 1, "this is the port of npuserve's metrics; gRPC has another, 50051"),
    ("generate x --target 127.0.0.1:{web}", 1, "this port belongs to a web server without gRPC"),
    ("generate x --target 127.0.0.1:{ssh}", 1, "the server at this port speaks neither gRPC nor TLS"),
    ("generate x --target 127.0.0.1:{grpc} --tls", 1, "the server speaks no TLS; leave out --tls, --tls-ca"),
    ("generate x --target 127.0.0.1", 2, "must be HOST:PORT, such as 127.0.0.1:50051, got '127.0.0.1'"),
    ("generate x --target http://127.0.0.1:50051", 2, "must be HOST:PORT, such as 127.0.0.1:50051"),
    ("top --once --target 127.0.0.1:{grpc}", 1,
     "this port speaks gRPC; give the metrics port, which is 9090 by default"),
    ("top --once --target 127.0.0.1:1", 1, "no server answers there (Connection refused)"),
]
INPUTS = [
    ("generate x --json-schema absent", 2, "--json-schema: absent: No such file or directory"),
    ("generate x --json-schema '{{\"type\": \"object\"}}'", 2,
     "--json-schema: takes the path of a file, not the text itself; write it into a file"),
    ("generate x --json-schema schema.json", 2, "--json-schema: schema.json: is not JSON"),
    ("generate x --chat --tools tools.json", 2, "--tools: tools.json must be a JSON list of objects"),
    ("check ./absent", 2, "model: there is no folder ./absent"),
    ("check ./loar", 2, "model: there is no folder ./loar (did you mean lora?)"),
    ("check model.gguf", 2, "is a file of another format; serve the model that it was made from"),
    ("check http://127.0.0.1:50051", 2, "is an address; give a folder, or a hub name such as Qwen/Qwen3-0.6B"),
    ("check lora", 1, "holds a LoRA adapter, which is not served; merge it into its model"),
    ("check q4", 1, "holds a GGUF file, which is not read; serve the model that it was made from, in safetensors"),
    ("check original", 1, "Mistral's or Meta's own format; serve its version for transformers"),
    ("check empty", 1, "empty/config.json: no such file; a model folder holds config.json and *.safetensors"),
    ("quantize pickled out --calibration none", 2,
     "pytorch_model.bin is pickled, which can run code as it is read: convert it to safetensors"),
    ("check gptq", 1, "quantization_config: bits: 8 is not supported; supported: 4"),
    ("check bnb", 1, "another method (bitsandbytes); supported: compressed-tensors, fp8, awq, gptq. Serve the model"),
    ("check w4a8", 1, "g.weights: symmetric: False is not supported; supported: True"),
    ("check mistral", 1, "'MistralForCausalLM'] is not supported; serve a model of one of these: Qwen3ForCausalLM"),
    ("check gemma", 1, "'Gemma3ForConditionalGeneration'] is not supported; serve a model of one of these"),
    ("check experts", 1, "num_experts_per_tok: 8 is more than the model's 4 experts (num_experts)"),
    ("quantize mistral out", 2, "is not supported; serve a model of one of these"),
    ("quantize bnb out", 2, "Serve the model that this one was made from"),
    ("collect --output absent/a.tar.gz", 2, "output: absent/a.tar.gz: No such file or directory"),
    ("check --least-share 0.5", 2, "least_share: needs --accept"),
]
CASES = [*FLAGS_OF_OTHERS, *ORDER, *VALUES, *FILES_OF_SETTINGS, *SECRETS, *SERVERS, *INPUTS]


@pytest.mark.parametrize(("line", "code", "words"), [pytest.param(*case, id=case[0]) for case in CASES])
def test_mistake_is_named_with_the_next_step(
    folder: Path, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str,
    code: int, words: str,
) -> None:
    monkeypatch.chdir(folder)
    try:
        found = main(shlex.split(line.format(**ports)))
    except SystemExit as end:
        found = end.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    message = err or out
    assert found == code, message
    assert words.format(**ports) in message
    assert "Traceback" not in message
    if line.startswith("check") and code == 1:
        return  # a report
    assert out == ""
    assert len(err.splitlines()) == 1, "a sentence"
    assert len(err) < 500


def test_mistakes_differ() -> None:
    assert len({line for line, *_ in CASES}) == len(CASES) >= 60


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "words"), [
    (("--api-keys", "absent"), "absent cannot be read: No such file or directory; npuserve keys add FILE NAME makes"),
    (("--tls-cert", "a.pem", "--tls-key", "b.pem"), "tls_cert: a.pem cannot be read: No such file or directory"),
    (("model.gguf",), "model.gguf is a file of another format; serve the model that it was made from"),
    (("mistral",), "is not supported; serve a model of one of these"),
    (("lora",), "holds a LoRA adapter, which is not served; merge it into its model"),
])
def test_serve_ends_with_the_mistake_on_the_last_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    """Processes of the server find these."""
    monkeypatch.chdir(folder)
    done = npuserve("serve", *arguments, "--port", "0", "--metrics-port", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("name", "words"), [
    ("NPUSERVE_GPU_MEMORY_UTILIZATION", "no such setting; here it is NPUSERVE_KV_CACHE_MEMORY: the size of the cache"),
    ("NPUSERVE_MAX_NUM_SEQ", "no such setting; did you mean NPUSERVE_MAX_NUM_SEQS?"),
    ("NPUSERVE_BANANA", "no such setting; docs/configuration.md lists them"),
])
def test_variable_that_is_no_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert main(["serve"]) == 2
    assert f"{name}: {words}" in capsys.readouterr().err
