"""A model's folder: finding or downloading it, and the contents that a front end needs.

    python -m npuserve.service.text.model_folder NAME      downloads a model; started by `fetch`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from npuserve.npu import storyteller
from npuserve.npu.model.config import ModelError
from npuserve.npu.model.folder import check_downloaded, check_links
from npuserve.service.arguments import similar
from npuserve.service.config import ConfigError
from npuserve.service.ipc import child, process_control

if TYPE_CHECKING:
    from npuserve.service.text.tokenizer import Tokenizer

BUILT_IN = "storyteller"
MAX_ID = 1 << 31
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model", "*.tiktoken"]


class Range(NamedTuple):
    """Interval [low, high], or (low, high] with `above`."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: object) -> bool:
        """Return whether a number is in the interval; NaN is in none."""
        return isinstance(value, (int, float)) and self.low <= value <= self.high and not (
            self.above and value == self.low)

    def __str__(self) -> str:
        return f"{'(' if self.above else '['}{self.low}, {self.high}]"


DEFAULT_RANGES = {
    "temperature": Range(0, 100), "top_p": Range(0, 1, above=True), "top_k": Range(-1, (1 << 31) - 1),
    "min_p": Range(0, 1), "repetition_penalty": Range(0, 100, above=True),
}
"""Sampling parameters whose defaults a model's generation_config.json may set, with their ranges."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Contents of a model's folder, read once by `open_folder`.

    name: name under which the model is served.
    names: values that a request's `model` field may have.
    eos_token_ids: ids that end an answer.
    defaults: values of absent sampling parameters.
    tokenizer: None if the folder has none.
    path: absolute path of the folder.
    config: content of config.json.
    """

    name: str
    names: frozenset[str]
    eos_token_ids: frozenset[int] = frozenset()
    defaults: dict[str, float] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    path: Path = Path("/")
    config: dict[str, Any] = field(default_factory=dict)


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
        raise ConfigError(f"model: {model} is a file; give the folder that holds config.json and *.safetensors")
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
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "npuserve.service.text.model_folder", model, start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    try:
        output = await process.stdout.read()
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        report = msgspec.json.decode(output.rstrip().rpartition(b"\n")[2], type=dict[str, str])
    except msgspec.MsgspecError:
        raise ConfigError(
            f"model: {model} cannot be downloaded from the hub: its download ended with code {code}") from None
    if report["event"] == "failed":
        raise ConfigError(report["error"])
    return Path(report["folder"])


def _similar_folder(path: Path) -> str:
    """Return a hint with a folder whose name is similar to the first part of `path` that does not exist."""
    while not path.parent.is_dir():
        path = path.parent
    try:
        folders = [beside.name for beside in path.parent.iterdir() if beside.is_dir()]
    except OSError:
        return ""
    found = similar(path.name, folders)
    return f" (did you mean {path.parent / found}?)" if found else ""


def open_folder(folder: Path, model: str, served_name: str) -> ModelFolder:
    """Read a model's folder and load its tokenizer.

    model: the user's name of the model.
    served_name: name to serve it under; "" for the default.

    Raises ConfigError if the folder is unusable.
    """
    # Imports jinja2 and tokenizers, which programs that only look for the folder do not need.
    from npuserve.service.text.tokenizer_loader import load_tokenizer

    try:
        check_links(folder)
        check_downloaded(sorted(folder.glob("*.json")))
    except ModelError as error:
        raise ConfigError(f"model: {error}") from None
    config = _read(folder / "config.json", required=True)
    generation = _read(folder / "generation_config.json")
    tokenizer = load_tokenizer(folder)
    name = served_as(folder, model, served_name)
    size = config.get("vocab_size")
    eos = frozenset(
        i for i in (*_eos_ids(generation, "generation_config.json"), *_eos_ids(config, "config.json"))
        if 0 <= i < (size if isinstance(size, int) else MAX_ID))
    if not eos and tokenizer and tokenizer.eos_id is not None:
        eos = frozenset({tokenizer.eos_id})
    return ModelFolder(
        name, frozenset({name, model} - {""}), eos, _defaults(generation), tokenizer, folder.absolute(), config)


def served_as(folder: Path, model: str, served_name: str) -> str:
    """Return the name under which a model is served. Arguments as in `open_folder`."""
    if served_name or not model:
        return served_name or BUILT_IN
    return folder.resolve().name if Path(model).expanduser().is_dir() else model


def _read(path: Path, required: bool = False) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"model: {path.parent} has no {path.name}") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model: {path} is not a JSON object")
    return found


def _eos_ids(data: dict[str, Any], file: str) -> list[int]:
    """Return the ids of eos_token_id, which is an id, a list of ids, or null. Some may be no tokens of the model."""
    value = data.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise ConfigError(f"model: eos_token_id in {file} is {value!r}, not a token id or a list of token ids")
    return values


def _defaults(generation: dict[str, Any]) -> dict[str, float]:
    """Return the sampling defaults of generation_config.json: the ones that vLLM's `--generation-config auto` reads.

    As in transformers, "do_sample": false is temperature 0, and only the repetition penalty applies then.
    """
    found: dict[str, float] = {}
    names = tuple(DEFAULT_RANGES)
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
        names = ("repetition_penalty",)
    for name in names:
        allowed = DEFAULT_RANGES[name]
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or value not in allowed:
            raise ConfigError(f"model: {name} in generation_config.json is {value!r}, not in {allowed}")
        if name == "top_k":
            if value != int(value):
                raise ConfigError(f"model: top_k in generation_config.json is {value!r}, not a whole number")
            value = int(value)
        found[name] = value
    return found


def _download(model: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub

    hint = _similar_folder(Path(model))
    if constants.HF_HUB_CACHE.startswith("~"):
        raise ConfigError(f"model: {model} is no folder here{hint} and cannot be downloaded from the hub: the home "
                          "directory is unknown; set HF_HOME to a folder for downloads")
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
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
    process_control.die_with_parent()
    child.listen()
    try:
        child.report("found", folder=str(_download(sys.argv[1])))
    except ConfigError as error:
        child.report("failed", error=str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
