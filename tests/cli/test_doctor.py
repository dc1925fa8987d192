"""The doctor: faults of engines that were set up with them on purpose, and of servers."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pagedinfer.cli.main import main
from pagedinfer.engine.scheduler import SchedulerConfig
from pagedinfer.planning.server_facts import facts_from_metrics
from tests.conftest import TinyModel

PROBE = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--block-size",
    "8",
    "--max-model-len",
    "64",
    "--requests",
    "12",
]
LENGTHS = ["--prompt-tokens", "10", "--output-tokens", "40"]
ROOM = ["--num-gpu-blocks-override", "200"]

SERVER = {
    "num_requests_running": 0,
    "kv_cache_usage_perc": 0.0,
    "kv_cache_usage_peak_perc": 0.5,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "num_kv_blocks": 1000,
    "engine_steps_total": 500,
    "generation_tokens_total": 20_000,
    'request_success_total finished_reason="stop"': 200,
    'request_success_total finished_reason="length"': 40,
    "num_preemptions_total": 2,
    'preemptions_by_mode_total mode="recompute"': 2,
    'limited_steps_total reason="slots"': 10,
    'limited_steps_total reason="blocks"': 20,
}
"""Metrics of a server without a fault, which is idle by now."""
INFO = {
    "block_size": 16,
    "device": "cuda:0",
    "cache_dtype": "bfloat16",
    "num_cpu_blocks": 64,
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.92,
    "enforce_eager": False,
    "scheduling_policy": "fcfs",
    "watermark": 0.0,
    "repetition_penalty": 1.0,
}


def exposition(**changes: Any) -> str:
    """/metrics of such a server with other values; `slots`, `blocks`: steps limited by them."""
    limited = {
        f'limited_steps_total reason="{name}"': changes.pop(name)
        for name in ("slots", "blocks")
        if name in changes
    }
    series = SERVER | limited | {name: value for name, value in changes.items() if name in SERVER}
    info = INFO | {name: value for name, value in changes.items() if name in INFO}
    labels = ",".join(f'{name}="{value}"' for name, value in info.items())
    lines = [
        "# HELP pagedinfer_num_requests_running requests that hold a slot",
        "vllm:num_requests_running 4.0",
    ]
    for name, value in series.items():
        name, _, label = name.partition(" ")
        lines.append(f'pagedinfer_{name}{{{label + "," if label else ""}model_name="m"}} {float(value)}')
    return "\n".join([*lines, f"pagedinfer_cache_config_info{{{labels}}} 1.0", ""])


SERVER_FAULTS: dict[str, dict[str, Any]] = {
    "memory-too-tight": {"gpu_memory_utilization": 0.97},
    "thrashing": {"num_preemptions_total": 100},
    "too-few-slots": {"slots": 400},
    "too-little-cache": {"blocks": 400, "kv_cache_usage_peak_perc": 1.0},
    "fewer-tokens-than-slots": {"max_num_batched_tokens": 32},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
    "long-steps-before-urgent": {"scheduling_policy": "priority", "max_num_batched_tokens": 8192},
    "idle-cache": {"watermark": 0.5},
    "penalty-by-default": {"repetition_penalty": 1.1},
}


def rules(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    code = main(["doctor", "--json", *words])
    found = [advice["rule"] for advice in json.loads(capsys.readouterr().out)]
    assert code == (1 if found else 0)
    return found


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (ROOM, []),
        ([*ROOM, "--max-num-seqs", "2"], ["too-few-slots"]),
        (["--num-gpu-blocks-override", "16"], ["too-little-cache-on-a-cpu"]),
        ([*ROOM, "--max-num-seqs", "16", "--max-num-batched-tokens", "8"], ["fewer-tokens-than-slots"]),
        ([*ROOM, "--no-enable-prefix-caching"], ["no-prefix-cache"]),
        ([*ROOM, "--watermark", "0.5"], ["idle-cache"]),
        ([*ROOM, "--dtype", "bfloat16"], []),
    ],
)
def test_an_engine_with_a_fault(
    flags: list[str], expected: list[str], tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rules(capsys, tiny_llama.path, *PROBE, *LENGTHS, *flags)
    assert [rule for rule in found if rule != "steps-too-small"] == expected


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], []),
        (["--gpu-memory-utilization", "0.97"], ["memory-too-tight"]),
        (["--enforce-eager"], ["eager"]),
        (
            ["--scheduling-policy", "priority", "--max-num-batched-tokens", "8192"],
            ["long-steps-before-urgent"],
        ),
    ],
)
def test_an_engine_with_a_fault_on_a_gpu(
    flags: list[str], expected: list[str], tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cuda", "--dtype", "float16", *LENGTHS, *ROOM, *flags]
    assert rules(capsys, tiny_llama.path, "--max-model-len", "64", *words) == expected


def test_more_slots_than_the_cache_holds(
    tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission would prevent it: it is told to admit whatever has room for its prompt."""
    greedy = functools.partial(SchedulerConfig, admission_policy="greedy")
    monkeypatch.setattr("pagedinfer.engine.engine.SchedulerConfig", greedy)
    flags = ["--num-gpu-blocks-override", "24", "--max-num-seqs", "12"]
    assert "thrashing" in rules(capsys, tiny_llama.path, *PROBE, *LENGTHS, *flags)


def test_prompts_that_fill_the_steps(tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt-tokens", "60", "--output-tokens", "2", "--max-num-batched-tokens", "8"]
    assert "steps-too-small" in rules(capsys, tiny_llama.path, *PROBE, *lengths, *ROOM, "--max-num-seqs", "8")


def test_what_it_says(tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", tiny_llama.path, *PROBE, *LENGTHS, *ROOM, "--max-num-seqs", "2"]) == 1
    text = capsys.readouterr().out
    assert "12 requests finished" in text
    assert "too-few-slots: try max_num_seqs=" in text
    assert main(["doctor", tiny_llama.path, *PROBE, *LENGTHS, *ROOM]) == 0
    assert "Nothing to change." in capsys.readouterr().out


def test_a_model_or_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    assert "name a model to probe, or a server" in capsys.readouterr().err


def test_facts_from_metrics() -> None:
    facts = facts_from_metrics(exposition(slots=400, watermark=0.5, enable_prefix_caching=False))
    assert (facts.device, facts.max_num_seqs, facts.num_kv_tokens) == ("cuda", 64, 16_000)
    assert (facts.num_steps, facts.num_finished, facts.num_cpu_blocks) == (500, 240, 64)
    assert facts.limited_steps == {"slots": 400, "blocks": 20, "tokens": 0}
    assert (facts.mean_running, facts.kv_cache_usage) == (40.0, 0.5)
    assert (facts.enable_prefix_caching, facts.enforce_eager, facts.watermark) == (False, False, 0.5)
    assert (facts.gpu_memory_utilization, facts.scheduling_policy) == (0.92, "fcfs")
    few = facts_from_metrics("pagedinfer_num_requests_running 0.0\n")
    assert (few.device, few.enable_prefix_caching, few.mean_running) == (None, None, None)
    with pytest.raises(ValueError, match="no metrics of pagedinfer"):
        facts_from_metrics("vllm:num_requests_running 4\n")


class FakeServer:
    """Answers /metrics with `text`, to whoever has the key."""

    def __init__(self) -> None:
        self.text = exposition()
        self.url = ""


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/metrics" and self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(fake.text.encode() if known else b"")

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        fake.url = f"http://127.0.0.1:{httpd.server_port}"
        yield fake
        httpd.shutdown()
        thread.join()


@pytest.mark.parametrize("fault", [None, *SERVER_FAULTS])
def test_a_server_with_a_fault(
    fault: str | None, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.text = exposition(**SERVER_FAULTS[fault] if fault else {})
    expected = [fault] if fault else []
    assert rules(capsys, "--url", server.url, "--api-key", "secret") == expected


def test_a_server_that_has_no_swap_space(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.text = exposition(num_preemptions_total=100, num_cpu_blocks=0)
    found = rules(capsys, "--url", server.url, "--api-key", "secret")
    assert found == ["thrashing", "nowhere-to-swap"]


def test_a_server_that_cannot_be_read(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDINFER_API_KEY", raising=False)
    assert main(["doctor", "--url", f"{server.url}/v1"]) == 1
    assert "401: Unauthorized" in capsys.readouterr().err
    assert main(["doctor", "--url", "file:///etc/hostname"]) == 1
    assert "a URL such as http" in capsys.readouterr().err
