"""Built-in model: a small Qwen3 that writes stories. model/README.md describes it."""

from pathlib import Path

FOLDER = Path(__file__).parent / "model"
