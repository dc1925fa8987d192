"""Token embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from pagedinfer.distributed.sharding import Shard, shard_vocabulary
from pagedinfer.layers.linear import linear
from pagedinfer.layers.placement import Placement
from pagedinfer.layers.stored_tensor import Piece, StoredTensor


class Embedding(nn.Module):
    """A row of the table for each id; weight [num_rows, hidden]. Every rank has all of it."""

    def __init__(self, num_rows: int, hidden_size: int, *, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(num_rows, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [num_tokens] -> [num_tokens, hidden]"""
        return functional.embedding(ids, self.weight)


class VocabularyEmbedding(nn.Module):
    """The embedding of tokens, of which each rank has a range; weight [padded range, hidden].

    The padding is there so that all ranks have the same number of rows; see `shard_vocabulary`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, placement: Placement) -> None:
        super().__init__()
        self.group = placement.group
        self.tokens, num_rows = shard_vocabulary(vocab_size, placement.group)
        self.weight = _padded_parameter(self.tokens, num_rows, hidden_size, placement)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [num_tokens] -> [num_tokens, hidden]"""
        if self.group.size == 1:
            return functional.embedding(ids, self.weight)
        rows = ids - self.tokens.start
        inside = rows.clamp(0, max(self.tokens.size - 1, 0))
        embedded = functional.embedding(inside, self.weight)
        return self.group.all_reduce(embedded.masked_fill_((inside != rows)[:, None], 0))

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, StoredTensor]]:
        """The name of the table in a checkpoint, and what this rank takes from it."""
        yield f"{path}.weight", _stored_rows(self.weight, self.tokens)


class LanguageModelHead(nn.Module):
    """Logits over the vocabulary, of which each rank computes those of its tokens.

    weight [padded range, hidden], the embedding's own where they are tied.
    """

    def __init__(self, embedding: VocabularyEmbedding, *, tied: bool, placement: Placement) -> None:
        super().__init__()
        self.placement = placement
        self.tokens = embedding.tokens
        self.weight = embedding.weight
        self.tied = True
        if not tied:
            self.untie()

    def untie(self) -> None:
        """Gives the head a weight of its own, not yet filled."""
        num_rows, hidden_size = self.weight.shape
        self.weight = _padded_parameter(self.tokens, num_rows, hidden_size, self.placement)
        self.tied = False

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, padded vocabulary]; the columns beyond the vocabulary say nothing."""
        return self.placement.group.all_gather(linear(hidden, self.weight))

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, StoredTensor]]:
        """As VocabularyEmbedding's; nothing where the weight is the embedding's."""
        if not self.tied:
            yield f"{path}.weight", _stored_rows(self.weight, self.tokens)


def _padded_parameter(tokens: Shard, num_rows: int, hidden_size: int, placement: Placement) -> nn.Parameter:
    parameter = placement.parameter(num_rows, hidden_size)
    parameter[tokens.size :].zero_()
    return parameter


def _stored_rows(weight: Tensor, tokens: Shard) -> StoredTensor:
    hidden_size = weight.shape[1]
    source = slice(tokens.start, tokens.stop), slice(0, hidden_size)
    return StoredTensor((tokens.total, hidden_size), [Piece(source, weight[: tokens.size])])
