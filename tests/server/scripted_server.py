"""`pagedinfer serve` with the scripted engine: takes the same flags."""

from __future__ import annotations

import functools
import sys

from transformers import PreTrainedTokenizerFast

from pagedinfer.cli.main import main
from pagedinfer.server import async_engine, run
from tests.server.conftest import SCRIPTED_ENGINE


def load_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """Without torch, whose import is most of a start."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


if __name__ == "__main__":
    async_engine._load_tokenizer = load_tokenizer
    run.run_server = functools.partial(run.run_server, engine_command=SCRIPTED_ENGINE)
    sys.exit(main(["serve", *sys.argv[1:]]))
