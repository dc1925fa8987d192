from __future__ import annotations

from dataclasses import fields

from pagedinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_field_names_are_vllms() -> None:
    def names(cls: type) -> set[str]:
        return {field.name for field in fields(cls)}

    assert names(Logprob) == {"logprob", "rank", "decoded_token"}
    assert names(CompletionOutput) == {
        "index",
        "text",
        "token_ids",
        "cumulative_logprob",
        "logprobs",
        "finish_reason",
        "stop_reason",
    }
    assert names(RequestOutput) == {
        "request_id",
        "prompt",
        "prompt_token_ids",
        "prompt_logprobs",
        "outputs",
        "finished",
        "metrics",
        "num_cached_tokens",
        "error",
    }
    assert names(RequestMetrics) >= {
        "num_generation_tokens",
        "num_preemptions",
        "arrival_time",
        "queued_ts",
        "scheduled_ts",
        "first_token_ts",
        "last_token_ts",
        "first_token_latency",
    }


def test_each_request_has_its_own_metrics() -> None:
    first, second = (RequestOutput(str(i), None, [1], [], False) for i in range(2))
    first.metrics.num_preemptions += 1
    assert second.metrics.num_preemptions == 0


def test_a_choice_is_finished_once_it_has_a_reason() -> None:
    choice = CompletionOutput(0, "", [])
    assert not choice.finished()
    choice.finish_reason = "length"
    assert choice.finished()
