"""The doctor: faults of engines that were set up with them on purpose, and of servers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from pagedinfer.cli.main import main
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

METRICS = """# HELP pagedinfer_num_requests_running requests that hold a slot
# TYPE pagedinfer_num_requests_running gauge
pagedinfer_num_requests_running{model_name="m"} 4.0
pagedinfer_kv_cache_usage_perc{model_name="m"} 0.12
pagedinfer_max_num_seqs{model_name="m"} 4.0
pagedinfer_max_num_batched_tokens{model_name="m"} 2048.0
pagedinfer_num_kv_blocks{model_name="m"} 1000.0
pagedinfer_engine_steps_total{model_name="m"} 500.0
pagedinfer_request_success_total{finished_reason="stop",model_name="m"} 20.0
pagedinfer_request_success_total{finished_reason="length",model_name="m"} 4.0
pagedinfer_num_preemptions_total{model_name="m"} 0.0
pagedinfer_preemptions_by_mode_total{mode="recompute",model_name="m"} 0.0
pagedinfer_limited_steps_total{model_name="m",reason="slots"} 400.0
pagedinfer_limited_steps_total{model_name="m",reason="blocks"} 0.0
pagedinfer_cache_config_info{block_size="16",device="cuda:0",num_cpu_blocks="64"} 1.0
vllm:num_requests_running{model_name="m"} 4.0
"""


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
    ],
)
def test_an_engine_with_a_fault(
    flags: list[str], expected: list[str], tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rules(capsys, tiny_llama.path, *PROBE, *LENGTHS, *flags)
    assert [rule for rule in found if rule != "steps-too-small"] == expected


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
    facts = facts_from_metrics(METRICS)
    assert (facts.device, facts.max_num_seqs, facts.num_kv_tokens) == ("cuda", 4, 16_000)
    assert (facts.num_steps, facts.num_finished, facts.num_cpu_blocks) == (500, 24, 64)
    assert facts.limited_steps == {"slots": 400, "blocks": 0, "tokens": 0}
    assert facts.enable_prefix_caching is None
    labels = 'enforce_eager="True",gpu_memory_utilization="0.97",scheduling_policy="priority",watermark="0.5"'
    told = facts_from_metrics(METRICS.replace('num_cpu_blocks="64"', labels))
    assert (told.enforce_eager, told.gpu_memory_utilization, told.watermark) == (True, 0.97, 0.5)
    assert told.scheduling_policy == "priority"
    told = facts_from_metrics(METRICS.replace('num_cpu_blocks="64"', 'enable_prefix_caching="False"'))
    assert told.enable_prefix_caching is False
    with pytest.raises(ValueError, match="no metrics of pagedinfer"):
        facts_from_metrics("vllm:num_requests_running 4\n")


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/metrics" and self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(METRICS.encode() if known else b"")

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_a_server(server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDINFER_API_KEY", raising=False)
    assert rules(capsys, "--url", server, "--api-key", "secret") == ["too-few-slots"]
    assert main(["doctor", "--url", f"{server}/v1"]) == 1
    assert "cannot be read: HTTP Error 401" in capsys.readouterr().err
    assert main(["doctor", "--url", "file:///etc/hostname"]) == 1
    assert "must begin with http" in capsys.readouterr().err
