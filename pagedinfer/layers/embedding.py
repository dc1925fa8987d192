"""Token embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pagedinfer.layers.placement import Placement


class Embedding(nn.Module):
    """A row of the table for each id; weight [num_rows, hidden]."""

    def __init__(self, num_rows: int, hidden_size: int, *, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(num_rows, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [num_tokens] -> [num_tokens, hidden]"""
        return functional.embedding(ids, self.weight)


class LanguageModelHead(nn.Module):
    """Logits over the vocabulary; weight [vocab, hidden], the embedding's own where they are tied."""

    def __init__(self, embedding: Embedding, *, tied: bool, placement: Placement) -> None:
        super().__init__()
        self.placement = placement
        self.weight = embedding.weight
        if not tied:
            self.untie()

    def untie(self) -> None:
        """Gives the head a weight of its own, not yet filled."""
        self.weight = self.placement.parameter(*self.weight.shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        return functional.linear(hidden, self.weight)
