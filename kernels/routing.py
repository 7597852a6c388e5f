"""Result of the router of a mixture of experts, by which the products by experts find their rows (experts.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of the tokens of a step.

    weights: [T, k] float32, weights of each token's experts.
    places: [T, k] int32, place of each of these pairs of token and expert in the order by expert; -1 for the experts of
        other ranks.
    begins: [E + 1] int32, first place of each of this rank's experts, and the number of places in use.
    all_experts: number of experts of all ranks.
    """

    weights: Tensor
    places: Tensor
    begins: Tensor
    all_experts: int

    @property
    def experts(self) -> int:
        """Number of experts of this rank."""
        return len(self.begins) - 1


def distinct_experts(tokens: int, top_k: int, all_experts: int, held: int) -> float:
    """Return the expected number of `held` experts that `tokens` choose, if each chooses `top_k` of all at random.

    all_experts: number of experts of all ranks.
    held: number of experts of this rank.
    """
    return float(held * (1 - (1 - top_k / all_experts) ** tokens))
