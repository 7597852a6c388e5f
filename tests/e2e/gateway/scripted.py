"""`npuserve serve` with an engine that generates the tokens of a script instead of computing them.

    python -m tests.e2e.gateway.scripted serve [SETTINGS]     the supervisor
    python -m tests.e2e.gateway.scripted engine               its engine process

The model's folder needs config.json and a tokenizer, and no weights. The file SCRIPT in it holds the token ids of the
next answers, as JSON. It is read at the begin of each answer. After its ids follows the end-of-text token.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROGRAM = (sys.executable, "-m", "tests.e2e.gateway.scripted")
SCRIPT = "script.json"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_theta": 1000000.0, "eos_token_id": 151645, "dtype": "bfloat16",
}


def make_folder(to: Path) -> Path:
    """Return the new folder `to` with the tokenizer of Qwen3, or skip the test if it is not at hand."""
    from tests.support.real_models import model_folder

    made = Path(shutil.copytree(model_folder("../tokenizers/qwen3"), to))
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def writer(folder: Path) -> Callable[[str], list[int]]:
    """Return a function that sets the text of the next answers, and returns its ids."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def write(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        (folder / SCRIPT).write_text(json.dumps(ids))
        return ids

    return write


def serve(arguments: list[str]) -> int:
    from npuserve.service.supervisor import supervisor
    from tests.support.altered_server import load_config

    config = load_config(arguments)
    return asyncio.run(supervisor.Supervisor(config, engine=(*PROGRAM, "engine")).run())


def engine() -> int:
    from npuserve.npu.step import Step, StepResult
    from npuserve.service.engine import process as engine_process
    from npuserve.service.engine.loop import Engine
    from tests.support.counting_runner import ServedRunner

    class ScriptedRunner(ServedRunner):
        """Runner that generates the ids of the script."""

        def __init__(self, folder: Path):
            super().__init__(folder, delay=0.002)
            self._file = folder / SCRIPT
            self._eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
            self._scripts: dict[int, list[int]] = {}

        def launch(self, step: Step) -> tuple[StepResult, float]:
            for ended in step.ended:
                del self._scripts[ended]
            for new in step.new:
                self._scripts[new.request_id] = json.loads(self._file.read_text())
            return super().launch(step)

        def next_token(self, request_id: int, tokens: list[int], prompt_tokens: int) -> int:
            script, made = self._scripts[request_id], len(tokens) - prompt_tokens
            return script[made] if made < len(script) else self._eos

    def build(args: engine_process.EngineArgs) -> tuple[Engine, None]:
        runner = ScriptedRunner(Path(args.folder))
        return engine_process.build_engine(args, runner, None, time.monotonic()), None  # type: ignore[arg-type]

    engine_process.build = build
    return engine_process.main()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "engine":
        from tests.support.altered_server import exit_as_engine

        exit_as_engine(engine())
    sys.exit(serve(rest))
