"""The init container's script, run in a shell: complete models only, each in its own folder, downloaded once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from npuserve.service.text.model_path import HUB_FILES, HUB_OTHER_FILES
from tests.helm.chart import Object, needs_helm, pod, render

pytestmark = needs_helm

HUB = """#!/bin/sh
# hf download NAME [--revision …] --local-dir FOLDER …, options with "=" or a space
echo start >>"$CALLS"
for word in "$@"; do
    case $last in
        --local-dir) folder=$word ;;
        --revision) revision=$word ;;
    esac
    case $word in
        --local-dir=*) folder=${word#*=} ;;
        --revision=*) revision=${word#*=} ;;
    esac
    last=$word
done
mkdir -p "$folder/.cache"
echo "${revision-main}" >"$folder/model.safetensors"
while [ -e "$GATE" ]; do /bin/sleep 0.01; done
echo "${revision-main}" >"$folder/config.json"
"""
REVISION = "c1899de289a04d12100db370d81485cdf75e47ca"


class Volume:
    """Shared volume with a fake hub command, and pods that download to it."""

    def __init__(self, folder: Path):
        self.models, self.calls, self.gate = folder / "models", folder / "calls", folder / "gate"
        self._programs = folder / "bin"
        for made in (self.models, self._programs):
            made.mkdir()
        for name, text in (("hf", HUB), ("sleep", "#!/bin/sh\nexec /bin/sleep 0.01\n")):
            (self._programs / name).write_text(text)
            (self._programs / name).chmod(0o755)

    def start(self, uid: str, model: Object) -> subprocess.Popen[str]:
        """Start the init container of a pod as the kubelet does, with /models on this volume."""
        values = {"model": {"source": "init", **model}}
        (container,) = pod(render(values))["initContainers"]
        environment = {"POD_UID": uid}

        def expand(text: str) -> str:
            found = re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: environment.get(m.group(1) or "", m.group(0)), text)
            return re.sub(r"^/models", str(self.models), found)

        for variable in container["env"]:
            if "value" in variable:
                environment[variable["name"]] = expand(variable["value"])
        inherited = {"PATH": f"{self._programs}:{os.environ['PATH']}", "CALLS": str(self.calls), "GATE": str(self.gate)}
        return subprocess.Popen([expand(word) for word in container["command"]], env={**environment, **inherited},
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)

    def fetch(self, uid: str, model: Object) -> str:
        """Run an init container successfully, and return its output."""
        process = self.start(uid, model)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        return output

    def wait_for_calls(self, count: int) -> None:
        while not self.calls.exists() or len(self.calls.read_text().split()) < count:
            time.sleep(0.01)

    def files(self) -> dict[str, str]:
        return {str(file.relative_to(self.models)): file.read_text().strip()
                for file in self.models.rglob("*") if file.is_file()}


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def complete(name: str, revision: str) -> dict[str, str]:
    return {f"{name}/{revision}/{file}": revision for file in ("config.json", "model.safetensors")}


PINNED: Object = {"hub": {"name": "a/b", "revision": REVISION}}


def test_fetch_two_pods_at_once_downloads_once(volume: Volume):
    volume.gate.touch()
    pods = [volume.start(uid, PINNED) for uid in ("one", "two")]
    volume.wait_for_calls(1)
    assert not (volume.models / "a--b" / REVISION).exists()
    volume.gate.unlink()
    outputs = [process.communicate(timeout=60)[0] for process in pods]
    assert [process.returncode for process in pods] == [0, 0], outputs
    assert volume.files() == complete("a--b", REVISION)
    assert volume.calls.read_text() == "start\n"
    assert sorted(path.name for path in volume.models.iterdir()) == ["a--b"]


def test_fetch_again_downloads_nothing(volume: Volume):
    volume.fetch("one", PINNED)
    volume.fetch("two", PINNED)
    assert volume.calls.read_text() == "start\n"


def test_fetch_killed_in_between_leaves_no_model_and_the_next_completes(volume: Volume):
    volume.gate.touch()
    process = volume.start("one", PINNED)
    volume.wait_for_calls(1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    target, lock = volume.models / "a--b" / REVISION, volume.models / "a--b" / f"{REVISION}.lock"
    assert lock.is_dir()
    assert not target.exists()
    volume.gate.unlink()
    waiting = volume.start("two", PINNED)
    past = time.time() - 200
    os.utime(lock, (past, past))
    output, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, output
    assert "is stale" in output
    assert {name: text for name, text in volume.files().items() if not name.startswith(".fetch-")} == complete(
        "a--b", REVISION)
    assert not lock.exists()


def test_fetch_removes_abandoned_folders_only(volume: Volume):
    past = time.time() - 3 * 3600
    for name in (".fetch-dead", ".fetch-slow"):
        (volume.models / name).mkdir()
        (volume.models / name / "model.safetensors").touch()
        os.utime(volume.models / name, (past, past))
    os.utime(volume.models / ".fetch-dead" / "model.safetensors", (past, past))
    volume.fetch("one", PINNED)
    assert sorted(path.name for path in volume.models.iterdir()) == [".fetch-slow", "a--b"]


def test_fetch_terminated_ends_the_download_and_frees_the_lock(volume: Volume):
    volume.gate.touch()
    process = volume.start("one", PINNED)
    volume.wait_for_calls(1)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert [path.name for path in (volume.models / "a--b").iterdir()] == []
    volume.gate.unlink()
    volume.fetch("one", PINNED)  # continues in its folder
    assert volume.files() == complete("a--b", REVISION)


def test_fetch_another_revision_leaves_the_old_one(volume: Volume):
    volume.fetch("one", PINNED)
    before = (volume.models / "a--b" / REVISION / "model.safetensors").stat()
    volume.fetch("two", {"hub": {"name": "a/b", "revision": "v2"}})
    volume.fetch("three", {"hub": {"name": "a/b"}})
    assert volume.files() == {**complete("a--b", REVISION), **complete("a--b", "v2"), **complete("a--b", "main")}
    after = (volume.models / "a--b" / REVISION / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_fetch_lost_race_keeps_the_first(volume: Volume):
    """Two pods hold the lock, as after a pause of the first one."""
    volume.gate.touch()
    first = volume.start("one", PINNED)
    volume.wait_for_calls(1)
    lock = volume.models / "a--b" / f"{REVISION}.lock"
    lock.rmdir()
    second = volume.start("two", PINNED)
    volume.wait_for_calls(2)
    volume.gate.unlink()
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert volume.files() == complete("a--b", REVISION)
    assert sorted(path.name for path in volume.models.iterdir()) == ["a--b"]


@pytest.mark.parametrize(("command", "said"), [(["false"], ""), (["mkdir", "-p", "$(MODEL_DIR)"], "no config.json")])
def test_fetch_failed_command_fails_the_container(volume: Volume, command: list[str], said: str):
    process = volume.start("one", {"init": {"command": command}})
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said in output
    assert volume.files() == {}


def test_fetch_own_command_has_a_folder_of_its_own(volume: Volume):
    def own(text: str) -> Object:
        return {"hub": {"name": "a/b"}, "init": {"command": ["sh", "-c", f'echo {text} >"$MODEL_DIR/config.json"']}}

    volume.fetch("one", own("x"))
    volume.fetch("two", own("y"))
    volume.fetch("three", own("x"))
    assert sorted(volume.files().values()) == ["x", "y"]


def test_fetch_unusable_volume_fails(volume: Volume):
    shutil.rmtree(volume.models)
    volume.models.touch()
    process = volume.start("one", PINNED)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, output


def test_fetch_downloads_the_files_that_the_server_reads(monkeypatch: pytest.MonkeyPatch):
    """The rendered command, as the pinned huggingface_hub parses it. Nothing asks PyPI for a newer version."""
    cli = pytest.importorskip("huggingface_hub.cli.hf")
    from huggingface_hub import constants
    from huggingface_hub.cli import download

    (container,) = pod(render({"model": {"source": "init", **PINNED}}))["initContainers"]
    command = container["command"]
    assert {"name": "HF_HUB_DISABLE_UPDATE_CHECK", "value": "1"} in container["env"]
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_UPDATE_CHECK", True)
    taken = {}

    def snapshot_download(**options: object) -> str:
        taken.update(options)
        return ""

    monkeypatch.setattr(download, "snapshot_download", snapshot_download)
    monkeypatch.setattr("sys.argv", command[command.index("hf"):])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert taken["repo_id"] == "a/b"
    assert taken["revision"] == REVISION
    assert taken["local_dir"] == "$(MODEL_DIR)"
    assert taken["allow_patterns"] == HUB_FILES
    assert taken["ignore_patterns"] == HUB_OTHER_FILES
