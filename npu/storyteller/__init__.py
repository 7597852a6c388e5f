"""The built-in model: a small Qwen3 that tells stories. See model/README.md for what it is and is not."""

from pathlib import Path

FOLDER = Path(__file__).parent / "model"
