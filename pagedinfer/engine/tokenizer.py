"""Loading a model's tokenizer. Torch-free until then."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagedinfer.models.gguf_config import is_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, or in a GGUF file. No code that is there is run.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    path = Path(path)
    folder, options = (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (path, {})
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # transformers reads config.json too, and may raise anything
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"no tokenizer can be loaded from {str(path)!r}: {reason}; name its folder with `tokenizer`, or "
            f"set skip_tokenizer_init=True and give token ids"
        ) from error
