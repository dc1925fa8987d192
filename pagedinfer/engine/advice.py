"""The rules of tuning: which parameter to change, to what, and why, from planned or measured numbers.

One set for all who give advice: warnings at the start and while running, `pagedinfer plan` and `pagedinfer
doctor`; docs/tuning.md is written from it. A rule looks at `Facts`, of which anything may be unknown; it says
nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

_OFTEN = 0.2  # of the steps: no chance event any more
_ENOUGH_STEPS = 50
_ENOUGH_REQUESTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of an engine: its parameters, and what it has measured. None: not known."""

    device: Literal["cuda", "cpu"] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_kv_tokens: int | None = None  # room in the KV cache
    num_cpu_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    scheduling_policy: str | None = None
    watermark: float | None = None
    repetition_penalty: float | None = None  # the model's default

    num_steps: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0  # of the preemptions, those whose KV was dropped
    limited_steps: Mapping[str, int] = field(default_factory=dict)  # in which somebody lacked it, by what
    mean_running: float | None = None  # requests in a step
    kv_cache_usage: float | None = None  # at its highest, 0 to 1


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change."""

    rule: str
    parameter: str
    value: str  # to try
    why: str  # with the numbers

    def __str__(self) -> str:
        return f"{self.parameter}={self.value}: {self.why}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on facts, and what it suggests.

    `symptom`, `remedy` and `reason` are its page in docs/tuning.md.
    """

    name: str
    parameter: str
    symptom: str
    remedy: str
    reason: str
    look: Callable[[Facts], tuple[str, str] | None]
    """The value to try, and why, with the numbers; None if there is nothing to say."""


def advise(facts: Facts) -> list[Advice]:
    """What to change, the most important first; nothing for an engine that is set up well."""
    found = []
    for rule in RULES:
        suggestion = rule.look(facts)
        if suggestion is not None:
            found.append(Advice(rule.name, rule.parameter, *suggestion))
    return found


def _share_limited(facts: Facts, by: str) -> float:
    """Share of the steps in which a request waited for lack of it; 0 while too few steps tell."""
    if facts.num_steps < _ENOUGH_STEPS:
        return 0.0
    return facts.limited_steps.get(by, 0) / facts.num_steps


def _preemption_rate(facts: Facts) -> float:
    """Preemptions for each request that ended; 0 while too few have."""
    return facts.num_preemptions / facts.num_finished if facts.num_finished >= _ENOUGH_REQUESTS else 0.0


def _too_tight(facts: Facts) -> tuple[str, str] | None:
    share = facts.gpu_memory_utilization
    if facts.device == "cpu" or share is None or share <= 0.95:
        return None
    return "0.92", (
        f"{share:g} of the free GPU memory leaves little for other processes and for fragmentation; above "
        f"0.95 a run may end in an out-of-memory error"
    )


def _thrashing(facts: Facts) -> tuple[str, str] | None:
    rate = _preemption_rate(facts)
    if rate <= 0.1 or facts.max_num_seqs is None:
        return None
    running = facts.mean_running or facts.max_num_seqs
    value = max(1, min(facts.max_num_seqs - 1, int(0.9 * running)))
    return str(value), (
        f"{facts.num_preemptions:,} preemptions for {facts.num_finished:,} finished requests: "
        f"{facts.max_num_seqs:,} slots are more than the KV cache holds requests for; fewer slots, or more "
        f"KV cache, save the work of moving and computing KV again"
    )


def _too_few_slots(facts: Facts) -> tuple[str, str] | None:
    share = _share_limited(facts, "slots")
    if share <= _OFTEN or facts.max_num_seqs is None or facts.kv_cache_usage is None:
        return None
    if facts.kv_cache_usage > 0.7:
        return None
    most = facts.max_num_seqs * min(8.0, 0.9 / max(facts.kv_cache_usage, 0.01))
    return str(max(facts.max_num_seqs + 1, int(most))), (
        f"in {100 * share:.0f} % of the steps a request waited for one of {facts.max_num_seqs:,} slots, "
        f"while at most {100 * facts.kv_cache_usage:.0f} % of the KV cache was in use; a step reads all "
        f"weights, however few requests share it"
    )


def _too_little_cache(facts: Facts) -> tuple[str, str] | None:
    share = _share_limited(facts, "blocks")
    if share <= _OFTEN or facts.device == "cpu":
        return None
    value = "0.95" if (facts.gpu_memory_utilization or 0.92) < 0.95 else "0.95, or more GPUs"
    return value, (
        f"in {100 * share:.0f} % of the steps a request waited for KV cache; besides, a lower "
        f"max_num_batched_tokens leaves more memory to it"
    )


def _too_little_cache_on_a_cpu(facts: Facts) -> tuple[str, str] | None:
    share = _share_limited(facts, "blocks")
    if share <= _OFTEN or facts.device != "cpu":
        return None
    return "more bytes", f"in {100 * share:.0f} % of the steps a request waited for KV cache"


def _too_small_steps(facts: Facts) -> tuple[str, str] | None:
    share = _share_limited(facts, "tokens")
    if share <= _OFTEN or facts.max_num_batched_tokens is None:
        return None
    return str(2 * facts.max_num_batched_tokens), (
        f"in {100 * share:.0f} % of the steps a request waited since the {facts.max_num_batched_tokens:,} "
        f"tokens of the step were used up; more of them make prompts quicker and the gaps between tokens "
        "longer"
    )


def _fewer_tokens_than_slots(facts: Facts) -> tuple[str, str] | None:
    if facts.max_num_seqs is None or facts.max_num_batched_tokens is None:
        return None
    if facts.max_num_batched_tokens >= facts.max_num_seqs:
        return None
    return str(2 * facts.max_num_seqs), (
        f"a step of {facts.max_num_batched_tokens:,} tokens cannot give each of {facts.max_num_seqs:,} "
        f"requests its next one"
    )


def _nowhere_to_swap(facts: Facts) -> tuple[str, str] | None:
    if _preemption_rate(facts) <= 0.1 or facts.num_cpu_blocks != 0 or facts.device != "cuda":
        return None
    return "4", (
        f"the KV of {facts.num_recomputed:,} preempted requests was computed again, since there is no CPU "
        f"memory to move it to"
    )


def _no_prefix_cache(facts: Facts) -> tuple[str, str] | None:
    if facts.enable_prefix_caching is not False:
        return None
    return "True", (
        "prompts that begin alike (a system prompt, a conversation that goes on) are computed again each "
        "time; finding them costs under a hundredth of a step"
    )


def _eager(facts: Facts) -> tuple[str, str] | None:
    if not facts.enforce_eager or facts.device == "cpu":
        return None
    return "False", (
        "without CUDA graphs a step of a few hundred launches is bound by the host: small batches take two "
        "to three times as long"
    )


def _long_steps_before_urgent(facts: Facts) -> tuple[str, str] | None:
    tokens = facts.max_num_batched_tokens
    if facts.scheduling_policy != "priority" or facts.device == "cpu" or tokens is None or tokens <= 4096:
        return None
    return "2048", (
        f"an urgent request waits for the step under way, and one of {tokens:,} prompt tokens takes some "
        f"hundred milliseconds"
    )


def _idle_cache(facts: Facts) -> tuple[str, str] | None:
    if facts.watermark is None or facts.watermark <= 0.2:
        return None
    return "0.0", (
        f"{100 * facts.watermark:.0f} % of the KV cache is kept free of new requests; the forecast of what "
        f"the running ones will need keeps room already"
    )


def _penalty_by_default(facts: Facts) -> tuple[str, str] | None:
    penalty = facts.repetition_penalty
    if penalty is None or penalty == 1.0 or facts.device == "cpu":
        return None
    return "vllm", (
        f"the model's generation_config.json sets repetition_penalty={penalty:g} for every request: each "
        f"step writes its row of logits anew, with the penalties, before it draws"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "memory-too-tight",
        "gpu_memory_utilization",
        "It is above 0.95.",
        "0.92; 0.95 at most.",
        "What is left must hold what other processes take, kernels that load later, and fragmentation.",
        _too_tight,
    ),
    Rule(
        "thrashing",
        "max_num_seqs",
        "More than one preemption for ten finished requests.",
        "Nine tenths of the requests that run on average; or more KV cache.",
        "Requests that outgrow the cache together move or compute their KV again. Admission forecasts how "
        "they will grow and mostly prevents it; where outputs are much longer than those before, it cannot.",
        _thrashing,
    ),
    Rule(
        "too-few-slots",
        "max_num_seqs",
        "In a fifth of the steps a request waits for a slot, and less than 70 % of the KV cache is in use.",
        "As many as fill the cache to 90 %.",
        "A step reads all weights, so that more requests in it cost little: a GPU that runs few is idle most "
        "of the time, whatever its utilisation says.",
        _too_few_slots,
    ),
    Rule(
        "too-little-cache",
        "gpu_memory_utilization",
        "In a fifth of the steps a request waits for KV cache, on a GPU.",
        "0.95; a lower max_num_batched_tokens; more GPUs (tensor_parallel_size).",
        "The cache is what is left beside the weights and the largest step.",
        _too_little_cache,
    ),
    Rule(
        "too-little-cache-on-a-cpu",
        "kv_cache_memory_bytes",
        "In a fifth of the steps a request waits for KV cache, on a CPU.",
        "More bytes; a quarter of the free memory is the default.",
        "As above.",
        _too_little_cache_on_a_cpu,
    ),
    Rule(
        "steps-too-small",
        "max_num_batched_tokens",
        "In a fifth of the steps a request waits since the step's tokens are used up.",
        "Twice as many.",
        "Prompts are computed in chunks of what a step has left. Larger steps are more efficient; all who "
        "decode beside them wait for their end.",
        _too_small_steps,
    ),
    Rule(
        "fewer-tokens-than-slots",
        "max_num_batched_tokens",
        "It is smaller than max_num_seqs.",
        "Twice max_num_seqs at least.",
        "Each running request needs a token of every step.",
        _fewer_tokens_than_slots,
    ),
    Rule(
        "nowhere-to-swap",
        "swap_space",
        "More than one preemption for ten finished requests, on a GPU, and no CPU memory to swap to.",
        "4 GiB or more.",
        "Moving KV over PCIe is mostly quicker than computing it again.",
        _nowhere_to_swap,
    ),
    Rule(
        "no-prefix-cache",
        "enable_prefix_caching",
        "It is off.",
        "True.",
        "It costs next to nothing, and saves whatever prompts have in common.",
        _no_prefix_cache,
    ),
    Rule(
        "eager",
        "enforce_eager",
        "It is on, with a GPU.",
        "False.",
        "One launch of a graph replaces some hundred launches, each of which takes the host longer than the "
        "GPU when the batch is small.",
        _eager,
    ),
    Rule(
        "long-steps-before-urgent",
        "max_num_batched_tokens",
        'More than 4,096, under scheduling_policy="priority".',
        "2048, which is the default there.",
        "An urgent request that arrives during a step waits for its end.",
        _long_steps_before_urgent,
    ),
    Rule(
        "idle-cache",
        "watermark",
        "It is above 0.2.",
        "0.0.",
        "Admission forecasts already what the running requests will need.",
        _idle_cache,
    ),
    Rule(
        "penalty-by-default",
        "generation_config",
        "The model's generation_config.json has a repetition_penalty.",
        '"vllm", which ignores it, if it is not wanted.',
        "The logits of a request with penalties are written anew in each step before it draws from them.",
        _penalty_by_default,
    ),
)


def guide(rules: Iterable[Rule] = RULES) -> str:
    """docs/tuning.md."""
    lines = [
        "# Tuning",
        "",
        "Written from `pagedinfer/engine/advice.py` by `python scripts/write_tuning_guide.py`; do not edit.",
        "",
        "pagedinfer applies these rules itself: it warns at the start and, at most every ten minutes, while",
        "running; `pagedinfer plan` applies them to a GPU that you do not have, and `pagedinfer doctor` to a",
        "server (`--url`) or to an engine that it starts for a short probe. None of them fires in an engine "
        "that",
        "is set up well, and the defaults are.",
        "",
        "| rule | sign | change | to |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {r.name} | {r.symptom} | `{r.parameter}` | {r.remedy} |" for r in rules]
    lines += ["", "## Why", ""]
    lines += [f"- **{rule.name}**: {rule.reason}" for rule in rules]
    lines += [
        "",
        "## What needs no tuning here",
        "",
        "- `max_tokens` far above what requests generate: admission learns real lengths.",
        "- `max_num_seqs` above what the KV cache holds: admission forecasts how requests grow, and 512 "
        "slots",
        "  with room for 200 reach the throughput of the best fixed number.",
        "- `top_k` and `top_p`: the sampler finds both cuts with one histogram, whatever their values.",
        "- `block_size`: 16 tokens lose little to partly filled blocks, and the kernels reach their "
        "bandwidth.",
        "",
    ]
    return "\n".join(lines)
