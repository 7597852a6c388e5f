"""Tokenizer of a gateway on another machine, which lacks the model's folder: by GetTokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from npuserve.npu import storyteller
from npuserve.v1 import tokenize_pb2
from tests.e2e.brittle import COUNTING
from tests.e2e.gateway.smg import gateway
from tests.e2e.server import serving
from tests.support.processes import MOUNT_NAMESPACE, require_mount_namespaces

HIDE = (*MOUNT_NAMESPACE, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
TEXTS = ("Once upon a time", " é 中 \U0001f600", "<|endoftext|>")


@pytest.mark.full
def test_gateway_without_the_folder_gets_the_tokenizer_from_its_worker(tmp_path: Path) -> None:
    require_mount_namespaces()
    folder = shutil.copytree(storyteller.FOLDER, tmp_path / "hidden" / "model")
    with serving(str(folder), "--served-name", "mine", **COUNTING) as server, gateway(
        [server.target], before=(*HIDE, str(folder.parent))
    ) as gate:
        assert server.metric("npuserve_requests_total", rpc="vllm.GetTokenizer", code="OK") == 1
        for text in TEXTS:
            status, found = gate.post("/v1/tokenize", {"model": "mine", "prompt": text, "add_special_tokens": False})
            ours = server.stub.Tokenize(tokenize_pb2.TokenizeRequest(text=text, add_special_tokens=False))
            assert (status, found["tokens"]) == (200, list(ours.token_ids))
