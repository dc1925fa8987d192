"""Times sample_tokens beside what else is installed.

    python benchmarks/bench_sample_tokens.py                           # ours and torch's operations
    python benchmarks/bench_sample_tokens.py --vs torch,flashinfer --json results/sample_tokens.json

Logits are 3 * N(0, 1), the vocabulary at random; bytes are those of one read of them, and `read` is what
one read takes at the rate of a device-to-device copy of the same run. The settings:

    greedy          argmax
    top-k + top-p   temperature 0.8, k = 50, p = 0.95
    top-k 1000      k = 1000
    top-p           p = 0.95: some 10,000 tokens stay, of 131,072
    peaked top-p    the same with logits of 8 * N(0, 1): some 10 tokens stay
    temperature     no filter
    min-p           0.05
    mixed           the settings above, one row after another

and the peers:

    torch        torch.argmax; a softmax, sort, cumulative sum and multinomial (not captured in a graph)
    flashinfer   FlashInfer's sampling kernels (not captured in a graph, as its own benchmarks do)

Ours must draw what the CPU draws from the same logits, or the figure is not printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import timing

from pagedinfer import ops

DEVICE = "cuda"
SHAPES = ((1, 131_072), (16, 131_072), (128, 131_072), (256, 128_256), (256, 151_936), (1, 49_152))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """One row's parameters, and how spread its logits are."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    spread: float = 3.0


SETTINGS = {
    "greedy": Setting(temperature=0.0),
    "top-k + top-p": Setting(temperature=0.8, top_k=50, top_p=0.95),
    "top-k 1000": Setting(top_k=1000),
    "top-p": Setting(top_p=0.95),
    "peaked top-p": Setting(top_p=0.95, spread=8.0),
    "temperature": Setting(),
    "min-p": Setting(min_p=0.05),
}


def settings_of(name: str, num_rows: int) -> list[Setting]:
    """Each row's setting."""
    if name == "mixed":
        every = list(SETTINGS.values())
        return [every[row % len(every)] for row in range(num_rows)]
    return [SETTINGS[name]] * num_rows


def slot_parameters(settings: list[Setting], device: str) -> dict[str, Tensor]:
    """One slot a row."""
    num_slots = len(settings)
    floats = {
        name: torch.tensor([getattr(setting, name) for setting in settings], device=device)
        for name in ("temperature", "top_p", "min_p")
    }
    return {
        **floats,
        "top_k": torch.tensor([setting.top_k for setting in settings], dtype=torch.int32, device=device),
        "seeds": torch.arange(num_slots, device=device),
        "positions": torch.full((num_slots,), 17, device=device),
    }


def random_logits(settings: list[Setting], vocab_size: int, dtype: torch.dtype) -> Tensor:
    spread = torch.tensor([setting.spread for setting in settings], device=DEVICE)
    return (torch.randn(len(settings), vocab_size, device=DEVICE) * spread[:, None]).to(dtype)


def ours(settings: list[Setting], logits: Tensor, *, with_logprobs: bool) -> Callable[[], Tensor]:
    device = logits.device.type
    parameters = slot_parameters(settings, device)
    slots = torch.arange(len(settings), dtype=torch.int32, device=device)
    token_ids = torch.empty(len(settings), dtype=torch.int64, device=device)
    logprobs = torch.empty(len(settings), device=device) if with_logprobs else None
    workspace = torch.empty(ops.sample_tokens_workspace_size(logits), dtype=torch.uint8, device=device)
    return lambda: ops.sample_tokens(
        logits, slots, **parameters, token_ids=token_ids, logprobs=logprobs, workspace=workspace
    )


def in_torch(setting: Setting, logits: Tensor) -> Callable[[], Tensor]:
    """By sorting. top-k and top-p and temperature only: what the plain recipe does."""
    if setting.temperature == 0:
        return lambda: logits.argmax(-1)

    def by_sorting() -> Tensor:
        probs = torch.softmax(logits.float() / setting.temperature, -1)
        probs, ids = probs.sort(-1, descending=True)
        if setting.top_p < 1:
            probs = torch.where(probs.cumsum(-1) - probs > setting.top_p, 0.0, probs)
        if setting.top_k > 0:
            probs[:, setting.top_k :] = 0
        if setting.min_p > 0:
            probs = torch.where(probs < setting.min_p * probs[:, :1], 0.0, probs)
        return ids.gather(1, torch.multinomial(probs, 1))

    return by_sorting


def in_flashinfer(setting: Setting, logits: Tensor) -> Callable[[], Tensor] | None:
    """The function that FlashInfer has for the setting, or none."""
    from flashinfer import sampling

    num_rows = len(logits)
    k = torch.full((num_rows,), setting.top_k, dtype=torch.int32, device=DEVICE)
    p = torch.full((num_rows,), setting.top_p, device=DEVICE)
    if setting.temperature == 0 or setting.min_p > 0:
        return None

    def probs() -> Tensor:
        return torch.softmax(logits.float() / setting.temperature, -1)

    if setting.top_k > 0 and setting.top_p < 1:
        return lambda: sampling.top_k_top_p_sampling_from_logits(
            logits.float() / setting.temperature, k, p, filter_apply_order="joint", deterministic=True
        )
    if setting.top_k > 0:
        return lambda: sampling.top_k_sampling_from_probs(probs(), k, deterministic=True)
    if setting.top_p < 1:
        return lambda: sampling.top_p_sampling_from_probs(probs(), p, deterministic=True)
    return lambda: sampling.sampling_from_probs(probs(), deterministic=True)


def draws_as_the_cpu(settings: list[Setting], logits: Tensor) -> bool:
    """Some rows are enough: rows do not know of each other."""
    some = settings[:8]
    drawn = ours(some, logits[:8], with_logprobs=False)()
    expected = ours(some, logits[:8].cpu(), with_logprobs=False)()
    return bool(torch.equal(drawn.cpu(), expected))


def measured(
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    peers: list[str],
    *,
    ceiling: float,
    seconds: float,
    with_logprobs: bool,
) -> list[dict[str, Any]]:
    num_rows, vocab_size = shape
    settings = settings_of(name, num_rows)
    size = num_rows * vocab_size * dtype.itemsize
    sets = [random_logits(settings, vocab_size, dtype) for _ in range(timing.rotations(size))]
    rows = []
    for who in ("ours", *peers):
        calls: list[Callable[[], Tensor] | None]
        if who == "ours":
            assert draws_as_the_cpu(settings, sets[0]), f"{name} {shape} {dtype}: CPU and CUDA differ"
            calls = [ours(settings, logits, with_logprobs=with_logprobs) for logits in sets]
        elif name == "mixed":
            continue
        else:
            peer = in_torch if who == "torch" else in_flashinfer
            calls = [peer(settings[0], logits) for logits in sets]
        if None in calls:
            continue
        captured = who == "ours" or (who == "torch" and name == "greedy")
        figure = timing.time_calls([call for call in calls if call], seconds=seconds, graph=captured)
        rows.append(
            {
                "setting": name,
                "rows": num_rows,
                "vocabulary": vocab_size,
                "who": who,
                **figure.columns(),
                "read": size / (ceiling / 1e6),
                "reads": figure.median * ceiling / size,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vs", default="torch", help="peers, comma-separated: torch, flashinfer")
    parser.add_argument("--settings", default=",".join((*SETTINGS, "mixed")))
    parser.add_argument("--shapes", default=",".join(f"{rows}x{columns}" for rows, columns in SHAPES))
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--logprobs", action="store_true", help="ask for log-probabilities too")
    parser.add_argument("--seconds", type=float, default=0.2, help="timed replays of one figure")
    parser.add_argument("--json", type=Path, help="write the figures and the machine here")
    args = parser.parse_args()
    timing.require_gpu()

    torch.manual_seed(0)
    ceiling = timing.copy_ceiling()
    rows: list[dict[str, Any]] = []
    for shape in args.shapes.split(","):
        num_rows, vocab_size = (int(number) for number in shape.split("x"))
        for name in args.settings.split(","):
            rows += measured(
                name,
                (num_rows, vocab_size),
                DTYPES[args.dtype],
                [peer for peer in args.vs.split(",") if peer],
                ceiling=ceiling,
                seconds=args.seconds,
                with_logprobs=args.logprobs,
            )
    print(f"microseconds; copy ceiling {ceiling / 1e12:.2f} TB/s")
    timing.print_table(rows)
    if args.json:
        timing.write_json(
            args.json, timing.result_of("sample_tokens", rows, ceiling=ceiling, dtype=args.dtype)
        )


if __name__ == "__main__":
    main()
