"""Steps of decodes alone, at padded sizes: on a GPU each size is one captured CUDA graph.

A step of a large model is a few hundred launches, and launching them one by one takes longer than the GPU
needs for a small batch. A graph holds them all, from the gathering of the inputs to the drawn tokens, and is
launched at once. It is fixed in shape; a batch is padded to the next size that there is a graph for. What
some requests ask for beyond their tokens makes a variant of the step, with graphs of its own, which are
captured when they are needed first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.distributed.group import SINGLE_RANK, Group
from pagedinfer.runner.best_tokens import BestTokensOnTheWay
from pagedinfer.runner.graph_recorder import GraphRecorder, sizes_in_time
from pagedinfer.runner.prefix_groups import PACKED_PREFIXES
from pagedinfer.runner.step_result import DrawnTokens, StepResult
from pagedinfer.runner.step_ring import StepRing


@dataclass(frozen=True, slots=True)
class StepVariant:
    """What a step of decodes does besides drawing tokens from the logits as they are."""

    changes: int | None = None
    """Changes logits, by the tensors of this number (see `Sampler.prepare`)."""
    num_best: int | None = None
    """Finds so many of the best tokens of each row."""
    with_prefixes: bool = False
    """Reads prefixes that requests share apart; `DecodeGraphs.run` sees to it."""

    @property
    def only_draws(self) -> bool:
        """Whether its requests ask for nothing but tokens; graphs of these are always kept."""
        return self.changes is None and self.num_best is None


PLAIN = StepVariant()

Compute = Callable[[Tensor, Tensor | None, DrawnTokens, StepVariant], ops.TopLogprobs | None]
"""A step from int32 [3, size] (see `InputBatch.pack_decodes`) and the prefixes that its requests share, if it
reads those apart (see `pack_prefixes`), which writes what it draws; gives the best tokens if the variant has
them."""

_PADDING = np.array([[-1], [0], [-1]], np.int32)  # a row without a request: slot, length, new block
_MOST_VARIANTS = 24  # graphs of variants that are kept; each takes some MB of the driver's memory


class DecodeGraphs:
    """Runs steps of decodes, replaying a graph on a GPU, and running the same padded step on the CPU.

    Args:
        sizes: numbers of rows to pad to, ascending; empty: `run` is of no use.
        device: where.
        group: the ranks that run the same graphs.
        recorder: captures them, on a GPU; by default one of its own.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        group: Group = SINGLE_RANK,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self._group = group
        self.sizes = list(sizes)
        self.max_rows = self.sizes[-1] if self.sizes else 0
        self._device = device
        num_inputs = 3 * self.max_rows + PACKED_PREFIXES
        self._inputs = torch.zeros(num_inputs, dtype=torch.int32, device=device)
        memory = torch.empty(DrawnTokens.nbytes(self.max_rows), dtype=torch.uint8, device=device)
        self._drawn = {size: DrawnTokens(size, device, memory) for size in self.sizes}
        self._ring = StepRing(self.max_rows, PACKED_PREFIXES, device)
        self._graphs: dict[tuple[int, StepVariant], _Graph] = {}  # of variants: the latest used last
        if recorder is None and device.type == "cuda" and self.sizes:
            recorder = GraphRecorder(device)
        self._recorder = recorder

    def run(
        self,
        packed: npt.NDArray[np.int32],
        compute: Compute,
        prefixes: npt.NDArray[np.int32] | None = None,
        variant: StepVariant = PLAIN,
    ) -> StepResult:
        """Starts a step of int32 [3, n], n at most `max_rows`; captures it first if it is new.

        prefixes: from `pack_prefixes`.
        """
        num_rows = packed.shape[1]
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        key = (size, variant if prefixes is None else replace(variant, with_prefixes=True))
        if self._recorder is not None and key not in self._graphs:
            self._make_room(variant)
            self._capture(*key, compute, self._recorder)
        place = self._ring.next_place()
        host = place.of(size)
        host.rows[:, :num_rows] = packed
        if num_rows < size:
            host.rows[:, num_rows:] = _PADDING
        if prefixes is not None:
            host.extra[:PACKED_PREFIXES] = prefixes
        if self._recorder is None:
            best = self._ring.launch(lambda: self._step(*key, compute))
        else:
            captured = self._graphs[key]
            if not variant.only_draws:
                self._graphs[key] = self._graphs.pop(key)
            self._ring.launch(captured.graph.replay)
            best = captured.best
        on_the_way = None if best is None else BestTokensOnTheWay(best, num_rows=num_rows)
        result = StepResult(self._drawn[size], num_rows, on_the_way, host=host.tokens)
        place.occupy(result)
        return result

    def _step(self, size: int, variant: StepVariant, compute: Compute) -> ops.TopLogprobs | None:
        """A whole step, from what the host has put down for it to what the host finds there."""
        rows, prefixes = self._inputs_of(size, variant)
        self._ring.read(self._inputs[: 3 * size + (0 if prefixes is None else PACKED_PREFIXES)])
        best = compute(rows, prefixes, self._drawn[size], variant)
        self._ring.write(self._drawn[size])
        return best

    def _inputs_of(self, size: int, variant: StepVariant) -> tuple[Tensor, Tensor | None]:
        rows, rest = self._inputs[: 3 * size].view(3, size), self._inputs[3 * size :]
        return rows, rest[:PACKED_PREFIXES] if variant.with_prefixes else None

    def capture(self, sizes: Sequence[int], compute: Compute, *, seconds: float) -> int:
        """Captures these sizes until so much time has passed; returns how many graphs there are.

        The largest should come first: the others fit into its memory.
        """
        if self._recorder is not None:
            new = [size for size in sizes if (size, PLAIN) not in self._graphs]
            for size in sizes_in_time(new, seconds, self._group):
                self._capture(size, PLAIN, compute, self._recorder)
        return len(self._graphs)

    def close(self) -> None:
        """Drops the graphs; none may be running."""
        self._graphs.clear()
        if self._recorder is not None:
            self._recorder.close()

    def _make_room(self, variant: StepVariant) -> None:
        """Drops graphs of variants that are not used any more, or not lately, before another is captured."""
        if variant.only_draws:
            return
        kept = [key for key in self._graphs if not key[1].only_draws]
        stale = []
        if variant.changes is not None:
            stale = [key for key in kept if key[1].changes not in (None, variant.changes)]
            kept = [key for key in kept if key not in stale]
        stale += kept[: max(0, len(kept) + 1 - _MOST_VARIANTS)]
        if stale:
            torch.cuda.synchronize(self._device)  # they may be running
        for key in stale:
            del self._graphs[key]

    def _capture(self, size: int, variant: StepVariant, compute: Compute, recorder: GraphRecorder) -> None:
        rows, prefixes = self._inputs_of(size, variant)
        rows.copy_(torch.from_numpy(np.broadcast_to(_PADDING, (3, size)).copy()))
        if prefixes is not None:
            prefixes.zero_()
        compute(rows, prefixes, self._drawn[size], variant)
        self._graphs[size, variant] = _Graph(*recorder.capture(lambda: self._step(size, variant, compute)))


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    best: ops.TopLogprobs | None
    """Where it writes the best tokens, in memory of its own."""
