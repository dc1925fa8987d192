"""What a server's metrics tell of its engine."""

from __future__ import annotations

import re
from typing import Any, Literal

from pagedinfer.engine.advice import Facts

_SAMPLE = re.compile(r"pagedinfer_(\w+?)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def facts_from_metrics(text: str) -> Facts:
    """Facts from the text of /metrics.

    Raises:
        ValueError: it has no metrics of pagedinfer.
    """
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is not None:
            labels = dict(_LABEL.findall(match[2] or ""))
            samples.setdefault(match[1], []).append((labels, float(match[3])))
    if "num_requests_running" not in samples:
        raise ValueError("these are no metrics of pagedinfer: pagedinfer_num_requests_running is missing")

    def value(name: str, **wanted: str) -> float:
        return sum(number for labels, number in samples.get(name, []) if wanted.items() <= labels.items())

    def limit(name: str) -> int | None:
        return int(value(name)) if name in samples else None

    info = samples.get("cache_config_info", [({}, 1.0)])[0][0]
    settings: dict[str, Any] = {}
    if "device" in info:
        settings["device"] = _device(info["device"])
    if "enable_prefix_caching" in info:
        settings["enable_prefix_caching"] = info["enable_prefix_caching"] == "True"
    if "enforce_eager" in info:
        settings["enforce_eager"] = info["enforce_eager"] == "True"
    for name in ("gpu_memory_utilization", "watermark", "repetition_penalty"):
        if name in info:
            settings[name] = float(info[name])
    if "num_cpu_blocks" in info:
        settings["num_cpu_blocks"] = int(info["num_cpu_blocks"])
    num_blocks = limit("num_kv_blocks")
    if num_blocks is not None and "block_size" in info:
        settings["num_kv_tokens"] = num_blocks * int(info["block_size"])
    num_steps = int(value("engine_steps_total"))
    # By priority, urgent requests displace others: preemptions are no sign of too little memory.
    displaces = info.get("scheduling_policy") == "priority"
    return Facts(
        **settings,
        scheduling_policy=info.get("scheduling_policy"),
        max_num_seqs=limit("max_num_seqs"),
        max_num_batched_tokens=limit("max_num_batched_tokens"),
        max_model_len=limit("max_model_len"),
        num_steps=num_steps,
        num_finished=int(value("request_success_total")),
        num_preemptions=0 if displaces else int(value("num_preemptions_total")),
        num_recomputed=int(value("preemptions_by_mode_total", mode="recompute")),
        limited_steps={
            reason: int(value("limited_steps_total", reason=reason))
            for reason in ("slots", "blocks", "tokens")
        },
        # A request that decodes generates a token in each step.
        mean_running=value("generation_tokens_total") / num_steps if num_steps else None,
        kv_cache_usage=value("kv_cache_usage_peak_perc"),
    )


def _device(name: str) -> Literal["cuda", "cpu"]:
    return "cuda" if name.startswith("cuda") else "cpu"
