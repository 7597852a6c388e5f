"""Values made of the last hidden states of requests that pool: embeddings and scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from npuserve.npu.model.config import ModelConfig

if TYPE_CHECKING:
    Vector = npt.NDArray[np.float32]

_FLOAT = np.dtype("<f4")
"""Number on the wire."""


class Pooler:
    """Pooling of one model.

    difference: [H] of a reranker, row of the LM head for the true token less the row for the false one, or the
        classifier's row. Its product with a hidden state is the log-odds of a match. None for an embedding model.
    """

    def __init__(self, difference: Vector | None = None):
        self._difference = difference

    @staticmethod
    def of(config: ModelConfig, folder: str) -> Pooler | None:
        """Return the pooler of a model; None if it generates text. Raises ModelError for the rows of a score."""
        if config.pooling is None:
            return None
        if config.pooling.task == "embed":
            return Pooler()
        from npuserve.npu.model.loader import read_head_rows  # imports torch

        ids = [i for i in (config.pooling.true_id, config.pooling.false_id) if i is not None]
        rows = read_head_rows(Path(folder), config, ids).numpy()
        return Pooler(rows[0] - rows[1] if len(rows) > 1 else rows[0])

    def values(self, hidden: Vector, dimensions: int, is_normalized: bool) -> bytes:
        """Return an embedding, or one score, as float32, little-endian.

        hidden: [H], last hidden state of a prompt.
        dimensions, is_normalized: of an embedding, its first values to return, and whether they get a norm of 1.
        """
        if self._difference is not None:
            odds = float(self._difference.astype(np.float64) @ hidden)
            values = np.array([_sigmoid(odds)])
        else:
            values = hidden[:dimensions]
            if is_normalized:
                values = values / max(float(np.linalg.norm(values)), 1e-12)
        return values.astype(_FLOAT).tobytes()


def _sigmoid(odds: float) -> float:
    """Return 1 / (1 + exp(-odds)), without overflow."""
    small = np.exp(-abs(odds))
    return float((1.0 if odds >= 0 else small) / (1.0 + small))
