"""Path of a model's folder: the built-in model, a folder that the user names, or a download from the hub.

    python -m npuserve.service.text.model_path      downloads the model that its first line names; started by `fetch`
"""

from __future__ import annotations

import asyncio
import contextlib
import stat
import sys
from pathlib import Path

from npuserve.npu import storyteller
from npuserve.npu.model.folder import EXAMPLE
from npuserve.service.arguments import similar
from npuserve.service.config import ConfigError
from npuserve.service.processes import child

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model", "*.tiktoken"]
HUB_OTHER_FILES = ["*/*.[!j]*", "*/*token*", "*/*/*"]
"""Patterns of the files that are needed, and of those that are not: of folders only small files are, such as
1_Pooling/config.json of an embedding model. In both `*` matches slashes too."""


def resolve(model: str) -> Path:
    """Return the folder of the built-in model (""), of a path, or of a hub name, which is downloaded if necessary.

    Must not be called while an event loop runs. Raises ConfigError, in one sentence, if there is no such model.
    """
    return local(model) or asyncio.run(fetch(model))


def local(model: str) -> Path | None:
    """Return the folder of the built-in model ("") or of a path; None for a hub name.

    Raises ConfigError for a file, and for a path that cannot be read.
    """
    if not model:
        return storyteller.FOLDER
    path = expand("model", model)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it has a NUL
        mode = 0
    except OSError as error:
        raise ConfigError(f"model: {model} cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        return path
    if mode:
        if path.suffix in (".gguf", ".bin", ".pt", ".pth", ".onnx"):
            raise ConfigError(f"model: {model} is a file of another format; serve the model that it was made from: a "
                              f"folder with config.json and *.safetensors, or a hub name such as {EXAMPLE}")
        raise ConfigError(f"model: {model} is a file; give the folder that holds config.json and *.safetensors")
    if "://" in model:
        raise ConfigError(f"model: {model} is an address; give a folder, or a hub name such as {EXAMPLE}")
    if model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1:
        raise ConfigError(f"model: there is no folder {model}{_similar_folder(path)}")
    return None


def expand(setting: str, path: str) -> Path:
    """Return a path with `~` and `~user` replaced by the home directory. Raises ConfigError if that is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{setting}: {path}: the home directory is unknown; give an absolute path") from None


async def fetch(model: str) -> Path:
    """Return the folder of a hub name, downloading it if necessary. Can be cancelled. Raises ConfigError.

    The hub's client downloads in threads that the interpreter joins at exit, even while they wait for the hub. So the
    download runs in a child process, which is killed on cancellation and ends with its parent.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "npuserve.service.text.model_path", start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    except (OSError, RuntimeError) as error:  # RuntimeError: no thread for its end can be started
        raise ConfigError(
            f"model: {model} cannot be downloaded from the hub: no process can be started: {error}") from error
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(child.encode_line(model))
        output = await process.stdout.read()
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    events = [event for line in output.splitlines() if (event := child.parse_event(line))]
    if not events:
        raise ConfigError(
            f"model: {model} cannot be downloaded from the hub: its download ended with code {code}")
    if events[-1]["event"] == "failed":
        raise ConfigError(events[-1]["error"])
    return Path(events[-1]["folder"])


def _similar_folder(path: Path) -> str:
    """Return a hint with a folder whose name is similar to the first part of `path` that does not exist."""
    while not path.parent.is_dir():
        path = path.parent
    try:
        folders = [beside.name for beside in path.parent.iterdir() if beside.is_dir()]
    except OSError:
        return ""
    name = similar(path.name, folders)
    return f" (did you mean {path.parent / name}?)" if name else ""


def _download(model: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub

    hint = _similar_folder(Path(model))
    if constants.HF_HUB_CACHE.startswith("~"):
        raise ConfigError(f"model: {model} is no folder here{hint} and cannot be downloaded from the hub: the home "
                          "directory is unknown; set HF_HOME to a folder for downloads")
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHER_FILES))
    except hub.GatedRepoError as error:
        raise ConfigError(f"model: {model} is gated; accept its terms on the hub and set HF_TOKEN") from error
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        raise ConfigError(f"model: {model} is neither a folder here{hint} nor a model on the hub") from error
    except hub.LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model: {model} is no folder here{hint}, was not downloaded before, and the hub cannot be reached "
            "(offline?); give a folder, or set HF_ENDPOINT to a mirror") from error
    except Exception as error:  # the hub's client raises the exceptions of its transport
        if isinstance(error, OSError) and error.filename:
            raise ConfigError(f"model: {model} cannot be downloaded from the hub: {error.filename}: {error.strerror}; "
                              "HF_HOME sets the folder of downloads") from error
        kind = type(error).__name__
        raise ConfigError(
            f"model: {model} is no folder here{hint} and cannot be downloaded from the hub ({kind})") from error


def main() -> int:
    model = child.read_arguments(str)
    child.listen()
    try:
        child.report("found", folder=str(_download(model)))
    except ConfigError as error:
        child.report("failed", error=str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
