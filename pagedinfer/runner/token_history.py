"""The tokens of those requests whose sampling looks at them, on the host."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pagedinfer.engine.batch import AdmittedRequest, ScheduledRequest


class TokenHistory:
    """What the requests of some slots have generated, for bad words and logits processors.

    To know a token on the host is to wait for the step that drew it; only steps with such a request do.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, list[int]] = {}
        self._outputs: dict[int, list[int]] = {}
        self._drawn: list[tuple[list[tuple[int, int]], Tensor]] = []  # (row, slot) pairs, and the tokens

    def begin(self, request: AdmittedRequest) -> None:
        """Follows a request from what is known of it when it is admitted."""
        self.forget(request.slot)
        self._prompts[request.slot] = request.token_ids[: request.num_prompt_tokens]
        self._outputs[request.slot] = request.token_ids[request.num_prompt_tokens :]

    def forget(self, slot: int) -> None:
        """Follows the request of a slot no longer."""
        if slot in self._outputs:
            self._catch_up()
            del self._outputs[slot], self._prompts[slot]

    def note(self, requests: Sequence[ScheduledRequest], token_ids: Tensor) -> None:
        """What a step draws for these requests, int64 [len(requests) and more].

        It need not be there yet, and may be overwritten by the next step.
        """
        if not self._outputs:
            return
        rows = [(row, request.slot) for row, request in enumerate(requests) if request.slot in self._outputs]
        if rows:
            self._drawn.append((rows, token_ids.clone()))

    def prompt(self, slot: int) -> list[int]:
        return self._prompts[slot]

    def output(self, slot: int) -> list[int]:
        """All that was generated; waits for the steps that are under way."""
        self._catch_up()
        return self._outputs[slot]

    def _catch_up(self) -> None:
        for rows, token_ids in self._drawn:
            tokens = token_ids.tolist()
            for row, slot in rows:
                self._outputs[slot].append(tokens[row])
        self._drawn.clear()
