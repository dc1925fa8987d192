"""The model's part of any step, at padded sizes: on a GPU each size is one captured CUDA graph.

A step with prompts launches some hundred kernels, which takes the host longer than the GPU needs for a few
hundred tokens. What follows the model depends on what the requests ask for, and is a few launches: so one
graph of a size serves every step of that many tokens, whatever its requests are and ask for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer.distributed.group import SINGLE_RANK, Group
from pagedinfer.runner.graph_recorder import GraphRecorder, sizes_in_time
from pagedinfer.runner.input_batch import PackedStep, StepShape

Forward = Callable[[Tensor, StepShape], Tensor]
"""From int32 [shape.packed_length] (see `InputBatch.unpack`) to hidden states, [num_tokens, hidden size]."""


class ForwardGraphs:
    """Runs the model over steps of any kind, padded to one of some sizes.

    Args:
        sizes: numbers of tokens to pad to, ascending; empty: `run` is of no use.
        max_num_seqs: the most requests of a step.
        device: where.
        group: the ranks that run the same graphs.
        recorder: captures the graphs; None: there are none, and steps are only padded.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        max_num_seqs: int,
        device: torch.device,
        group: Group = SINGLE_RANK,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self._group = group
        self.sizes = list(sizes)
        self._max_num_seqs = max_num_seqs
        self._recorder = recorder
        longest = self._shape(self.sizes[-1]).packed_length if self.sizes else 0
        self._packed = torch.zeros(longest, dtype=torch.int32, device=device)
        self._hidden: Tensor | None = None  # what the graphs leave, [largest size, hidden size]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def shape_for(self, num_tokens: int) -> StepShape | None:
        """What a step of so many tokens is to be padded to; None: it is too large."""
        place = bisect_left(self.sizes, num_tokens)
        return self._shape(self.sizes[place]) if place < len(self.sizes) else None

    def _shape(self, size: int) -> StepShape:
        return StepShape(size, num_rows=min(size, self._max_num_seqs), max_query_len=size)

    def run(self, step: PackedStep, forward: Forward) -> Tensor:
        """The hidden states of a step of a shape from `shape_for`, until the next one runs.

        A size that is new runs as it is, and is captured for the next time while the GPU is at work.
        """
        if self._recorder is None:
            return forward(step.packed, step.shape)
        packed = self._packed[: step.shape.packed_length]
        packed.copy_(step.packed)
        size = step.shape.num_tokens
        if size not in self._graphs:
            hidden = forward(packed, step.shape)
            self._capture(step.shape, hidden, forward, self._recorder)
            return hidden
        assert self._hidden is not None
        self._graphs[size].replay()
        return self._hidden[:size]

    def capture(
        self,
        sizes: Sequence[int],
        forward: Forward,
        padding: Callable[[StepShape], npt.NDArray[np.int32]],
        *,
        seconds: float,
    ) -> int:
        """Captures these sizes until so much time has passed; returns how many graphs there are.

        padding: see `InputBatch.padding`.
        """
        if self._recorder is not None:
            new = [size for size in sizes if size not in self._graphs]
            for size in sizes_in_time(new, seconds, self._group):
                shape = self._shape(size)
                packed = self._packed[: shape.packed_length]
                packed.copy_(torch.from_numpy(padding(shape)))
                self._capture(shape, forward(packed, shape), forward, self._recorder)
        return len(self._graphs)

    def close(self) -> None:
        """Drops the graphs; none may be running."""
        self._graphs.clear()
        self._hidden = None

    def _capture(self, shape: StepShape, hidden: Tensor, forward: Forward, recorder: GraphRecorder) -> None:
        """hidden: what `forward` gave for the shape."""
        if self._hidden is None:
            self._hidden = hidden.new_empty((self.sizes[-1], hidden.shape[1]))
        packed, out = self._packed[: shape.packed_length], self._hidden[: shape.num_tokens]
        self._graphs[shape.num_tokens], _ = recorder.capture(lambda: out.copy_(forward(packed, shape)))
