"""`npuserve serve` from its start to readiness, or to the sentence that says why it does not start."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.npu import storyteller
from tests.e2e.server import serving
from tests.support.command import npuserve

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f\nsize 12\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy of the built-in model."""
    return shutil.copytree(storyteller.FOLDER, tmp_path / "model")


def refused(*arguments: str, **environ: str) -> str:
    """Start a server that fails, check that its last line is the only error, and return it."""
    done = npuserve(
        "serve", "--port", "0", "--metrics-port", "0", *arguments, environ={"HF_HUB_OFFLINE": "1", **environ})
    assert (done.returncode, done.stdout) == (2, "")
    *logs, last = done.stderr.splitlines()
    assert all(json.loads(line)["level"] == "info" for line in logs)
    assert last.startswith("npuserve: ")
    return last.removeprefix("npuserve: ")


@pytest.mark.parametrize("command", [
    ("serve", "--port", "0", "--metrics-port", "0"), *(pytest.param(command, marks=pytest.mark.full)
    for command in (("check",), ("demo",), ("bench", "kernels"), ("bench", "step"),
                    ("quantize", "", "no-such-folder", "--calibration", "none")))])
@pytest.mark.parametrize("error", ['ImportError("no library", name="torch._C")', 'OSError("no library")'])
def test_torch_that_cannot_be_imported_is_one_sentence(command: tuple[str, ...], error: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    done = npuserve(*command, environ={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "npuserve: torch cannot be imported: no library"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("template", [
    "{% if %}", *(pytest.param(template, marks=pytest.mark.full) for template in (
        "{% if 1 %}" * 500 + "{% endif %}" * 500, "{{ 'a' * 10**9 * 8 }}"))])
def test_serve_with_a_chat_template_that_cannot_be_compiled_names_its_file(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    done = npuserve("serve", str(folder), "--port", "0", "--metrics-port", "0")
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"npuserve: chat template of {folder}: chat_template.jinja: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_serve_with_too_few_layers_ends_with_a_short_error(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config |= {"num_hidden_layers": layers + 45, "layer_types": ["full_attention"] * (layers + 45)}
    (folder / "config.json").write_text(json.dumps(config))
    error = refused(str(folder))
    assert error.startswith(f"{folder}: the tensors do not fit config.json; 495 missing: model.layers.{layers}.")
    assert error.endswith(f" and 492 more; config.json has {layers + 45} layers, the files have {layers}")
    assert len(error) < 600


@pytest.mark.full
@pytest.mark.parametrize(("arguments", "message"), [
    (("--tensor-parallel-size", "64"),
     "tensor_parallel_size: 64 does not divide the model's 4 attention heads; possible below are 1, 2, 4"),
])
def test_serve_with_an_impossible_setting_ends_before_the_model_is_loaded(
    arguments: tuple[str, str], message: str
) -> None:
    assert refused(*arguments) == message


@pytest.mark.full
def test_serve_with_nan_weights_names_the_tensor(folder: Path) -> None:
    """As test_serve_with_too_few_layers_ends_with_a_short_error, with a message of tests/npu/model/test_loader.py."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][-1, -1] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    assert refused(str(folder)) == (
        f"{folder}: model.layers.3.mlp.up_proj.weight: has numbers that are not finite (NaN or infinity)")


@pytest.mark.slow
@pytest.mark.parametrize("file", [
    "tokenizer.json", *(pytest.param(file, marks=pytest.mark.full) for file in ("model.safetensors", "config.json"))])
def test_serve_with_a_git_lfs_pointer_names_the_file(folder: Path, file: str) -> None:
    """More files: tests/npu/model/test_loader.py."""
    (folder / file).write_text(POINTER)
    assert refused(str(folder)).removeprefix("model: ") == (
        f"{folder / file}: is a Git LFS pointer, not the file itself; download it with: git -C {folder} lfs pull")


@pytest.mark.slow
def test_serve_with_a_mistyped_folder_suggests_the_right_one(folder: Path) -> None:
    """Other names: tests/service/text/test_model_path.py."""
    assert refused(str(folder.with_name("modle"))) == (
        f"model: there is no folder {folder.with_name('modle')} (did you mean {folder}?)")


@pytest.mark.parametrize(("host", "error"), [
    ("203.0.113.7", "Cannot assign requested address"),
    ("no-such-host.invalid", ""),
    ("127..0.0.1", "Name or service not known"),
])
@pytest.mark.parametrize("setting", ["host", "metrics_host"])
def test_serve_on_an_address_of_another_machine_names_the_host(setting: str, host: str, error: str) -> None:
    message = refused(f"--{setting.replace('_', '-')}", host)
    assert message.startswith(f"{setting}: cannot listen on {host}: {error}")
    assert message.endswith("; it must be an address of this machine, or 0.0.0.0 for all")


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("frontends", ["1", "2"])
def test_serve_on_a_taken_port_prints_one_line(frontends: str, is_shared: bool) -> None:
    """is_shared: the port is that of a server whose front ends share it."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=is_shared) as taken:
        port = taken.getsockname()[1]
        done = npuserve("serve", "--port", str(port), "--metrics-port", "0", "--frontends", frontends)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (f"npuserve: port: cannot listen on 127.0.0.1:{port}: Address already in use; end the "
                           "program that has the port, or set another port\n")


@pytest.mark.parametrize("setting", ["health-port", "openai-port"])
def test_serve_on_a_taken_further_port_names_it_before_the_model_is_loaded(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(f"--{setting}", str(port))
    name = setting.replace("-", "_")
    assert message.startswith(f"{name}: cannot listen on 127.0.0.1:{port}: Address already in use;")


@pytest.mark.parametrize("limit", [20, 48, 103])
def test_serve_with_few_open_files_names_the_limit(limit: int) -> None:
    serve = (sys.executable, "-m", "npuserve.cli", "serve", "--port", "0", "--frontends", "2")
    command = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *serve)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"npuserve: open files: the limit (ulimit -n) is {limit}; at least 104 are needed, and one for each connection "
        "of a front end\n")


SHORT_OF_PROCESSES = """
import os, sys
from npuserve.cli import main
from npuserve.service.supervisor import child_process

errors = [OSError(number, os.strerror(number)) for number in map(int, sys.argv.pop(1).split(","))]

def require(count):
    if errors:
        raise errors.pop(0)

child_process._require_files = require
sys.exit(main.main())
"""
"""`npuserve`, whose first processes cannot be started: these error numbers, with commas, come first."""


def test_serve_whose_front_end_cannot_be_started_names_the_cause() -> None:
    serve = ("serve", "--port", "0", "--metrics-port", "0")
    command = (sys.executable, "-c", SHORT_OF_PROCESSES, str(errno.EACCES), *serve)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "npuserve: frontend-0 cannot be started: [Errno 13] Permission denied\n"


@pytest.mark.full
def test_serve_short_of_processes_at_its_start_tries_again() -> None:
    """And logs once that it is ready. The policy: tests/service/supervisor/test_restart_policy.py."""
    with serving(program=("-c", SHORT_OF_PROCESSES, str(errno.EAGAIN), "serve")) as server:
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
    assert [line["error"] for line in lines if line.get("why") == "not_started"] == [
        "[Errno 11] Resource temporarily unavailable"]
    assert len([line for line in lines if "ready" in line["message"]]) == 1
