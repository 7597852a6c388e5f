"""The server under test of the fuzzer, and the conditions that it must keep."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc
from npuserve.v1 import model_pb2, prompt_pb2, tokenize_pb2
from tests.e2e.fuzz.wire import KEY
from tests.e2e.server import Server, request, serving
from tests.support.connect import connect
from tests.support.vllm_engine import vllm_request

CODES = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED",
    "FAILED_PRECONDITION", "UNIMPLEMENTED", "OUT_OF_RANGE", "UNAUTHENTICATED",
}
"""Status codes of a server that is up and has no bug."""

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.name | default('') }}\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ extra | default('') }}")


class Target:
    def __init__(self, server: Server):
        self.server = server
        self.port = int(server.target.rsplit(":", 1)[1])
        self._good = request("Once upon a time", 8)
        self._text = server.stub.Generate(self._good).text

    def check(self) -> None:
        """Check that the server is up and answers a valid request as before."""
        assert self.server.process.poll() is None, self.server.log[-2000:]
        assert self.server.stub.Generate(self._good, timeout=30).text == self._text

    def settle(self) -> None:
        """Wait until no request, stream or block is left, and check the server."""
        deadline = time.monotonic() + 20
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left
        self.check()
        bugs = [line for line in self.server.log.splitlines() if "internal error" in line or "died" in line]
        assert not bugs, bugs[:5]
        assert self.server.metric("npuserve_engine_restarts_total") == 0

    def resident(self) -> dict[str, tuple[int, int]]:
        """Return process -> (resident bytes, number of open files)."""
        found = {}
        for pid in (self.server.process.pid, *self._children()):
            folder = Path(f"/proc/{pid}")
            name = re.search(r"npuserve\.service\.(\w+)", (folder / "cmdline").read_bytes().decode(errors="replace"))
            pages = int((folder / "statm").read_text().split()[1])
            found[name.group(1) if name else str(pid)] = pages * 4096, len(list((folder / "fd").iterdir()))
        return found

    def _left(self) -> str:
        load = self.server.stub.GetLoad(model_pb2.GetLoadRequest())
        if load.running or load.waiting or load.free_kv_ratio < 1:
            return f"running {load.running}, waiting {load.waiting}, free {load.free_kv_ratio}"
        buffered = self.server.metric("npuserve_stream_buffered_tokens")
        return f"{buffered} tokens are buffered" if buffered else ""

    def _children(self) -> list[int]:
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.server.process.pid)],
                                capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split() if Path(f"/proc/{pid}/statm").exists()
                and Path(f"/proc/{pid}/cmdline").read_bytes().find(b"npuserve") >= 0]


def bodies() -> list[bytes]:
    """Return valid messages, which the fuzzer mutates."""
    ids = prompt_pb2.TokenIds(ids=[1, 2, 300])
    chat = prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content="hi", name="n")], tools=["{}"])
    chat.template_args["extra"] = [1, {"a": None}]
    made = [
        request("Once upon", 6, temperature=0.7, top_k=5, seed=3, stop=["z"], logprobs=2, logit_bias={5: 1.0}),
        pb.GenerateRequest(token_ids=ids, stopping=pb.StoppingParams(max_tokens=3)),
        pb.GenerateRequest(chat=chat, request_id="abc", stopping=pb.StoppingParams(max_tokens=3)),
        pb.ResumeStreamRequest(resume_token="x" * 22, token_offset=3), tokenize_pb2.TokenizeRequest(text="a b"),
        tokenize_pb2.TokenizeRequest(chat=chat), tokenize_pb2.DetokenizeRequest(token_ids=[1, 2, 3]),
        vllm_request([1, 2, 300], 3, request_id="abc", stop=["z"], logprobs=2, logit_bias={5: 1.0}, stream=True),
    ]
    return [message.SerializeToString() for message in made]


@contextlib.contextmanager
def target(folder: Path, *flags: str) -> Iterator[Target]:
    """Run a server of the built-in model with a chat template. Its context is short, so that valid requests end soon.

    folder: for its model and keys. flags: settings of the server.
    """
    model = folder / "model"
    shutil.copytree(FOLDER, model, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    keys = folder / "keys"
    keys.write_text(f'[fuzz]\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\nadmin = true\n')
    flags = ("--max-model-len", "64", "--max-num-seqs", "16", "--max-queue", "64", "--api-keys", str(keys), *flags)
    with serving(str(model), *flags) as server:
        server.channel = connect(server.target, KEY)
        server.stub = rpc.InferenceServiceStub(server.channel)
        yield Target(server)
