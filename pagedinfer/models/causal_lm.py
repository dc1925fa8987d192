"""What every language model offers to the runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor, nn

from pagedinfer.layers.attention import AttentionBatch
from pagedinfer.layers.embedding import LanguageModelHead
from pagedinfer.layers.moe import Experts


class CausalLM(nn.Module):
    """A decoder under an attribute of its family's name, and a head.

    Modules are named as in checkpoints, which is how weights find their place.
    """

    base_prefix: ClassVar[str] = "model."
    """What precedes the decoder's names in a checkpoint, unless it was saved without its head."""
    checkpoint_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Parts of module names, and what checkpoints have in their place."""
    ignored_tensors: ClassVar[Iterable[str]] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of names that checkpoints may hold and nothing needs."""

    lm_head: LanguageModelHead

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can hold a step: nothing in it waits for the device."""
        experts = (module for module in self.modules() if isinstance(module, Experts))
        return not any(each.waits_for_the_device for each in experts)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        """One step over all sequences' tokens, without padding between them.

        Args:
            input_ids: int64 [num_tokens]
            positions: int64 [num_tokens], each token's place in its sequence.
            kv_cache: dtype [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; the step's
                keys and values are written into it.
            attention: which tokens belong to which sequence, and where its cache is.

        Returns:
            dtype [num_tokens, hidden]: final hidden states, normalized.
        """
        raise NotImplementedError

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """dtype [rows, hidden] -> [rows, padded vocabulary]; the rows are those that somebody samples."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]
