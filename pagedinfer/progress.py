"""The progress bar of `LLM.generate`."""

from __future__ import annotations

import time
from typing import Any

from pagedinfer.outputs import RequestOutput


class ProgressBar:
    """Counts finished prompts on stderr, with the rates of prompt and generated tokens so far."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar: Any = None
        self._started = time.monotonic()
        self._num_input_tokens = 0
        self._num_output_tokens = 0
        if shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speed())

    def finish(self, output: RequestOutput) -> None:
        """Counts a request that has finished."""
        if self._bar is None:
            return
        self._num_input_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self._bar.set_postfix_str(self._speed(), refresh=False)
        self._bar.update(1)

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return (
            f"est. speed input: {self._num_input_tokens / seconds:.2f} toks/s, "
            f"output: {self._num_output_tokens / seconds:.2f} toks/s"
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
