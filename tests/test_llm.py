"""LLM: its arguments, its results, and that it can be used again whatever happened."""

from __future__ import annotations

import inspect
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from pagedinfer import LLM, DeviceError, OutOfMemoryError, RequestOutput, SamplingParams
from pagedinfer.config import EngineConfig
from tests.conftest import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def llm(tiny_llama: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        yield llm


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def prompts_of(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [3 + (7 * i) % 300 for i in range(length)]} for length in lengths]


# ---- parameters ------------------------------------------------------------------------------------


def test_its_parameters_are_those_of_the_configuration() -> None:
    parameters = dict(inspect.signature(LLM).parameters)
    del parameters["unknown"]
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert list(defaults) == [field.name for field in fields(EngineConfig)]
    assert defaults.pop("model") is inspect.Parameter.empty
    assert defaults == {field.name: field.default for field in fields(EngineConfig) if field.name != "model"}
    documentation = inspect.getdoc(LLM)
    assert documentation is not None
    for name in parameters:
        assert f"\n    {name}: " in documentation


def test_an_unknown_parameter_is_a_type_error_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="LLM has no parameter 'max_seq_len'; did you mean 'max_model_len'"):
        LLM("somewhere", max_seq_len=5)


def test_a_parameter_is_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be an integer from 1 to 65536"):
        LLM("there is no such folder", max_num_seqs=0)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no folder 'there is no such folder'"):
        LLM("there is no such folder")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_one_line(tiny_llama: TinyModel) -> None:
    """vllm#8243, vllm#4858."""
    with pytest.raises(DeviceError) as error:
        LLM(tiny_llama.path, device="cuda")
    assert "\n" not in str(error.value)
    assert "cuda" in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_without_a_gpu_is_the_cpu(tiny_llama: TinyModel) -> None:
    with LLM(tiny_llama.path, **OPTIONS | {"device": "auto"}) as llm:
        assert llm.llm_engine.worker.device.type == "cpu"


def test_max_model_len_beyond_the_model(tiny_llama: TinyModel) -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be at most 512 tokens.*got 513"):
        LLM(tiny_llama.path, **OPTIONS, max_model_len=513)


def test_a_cache_for_100_tokens(tiny_llama: TinyModel) -> None:
    """vllm#2418: needed, available, and the largest workable length."""
    block_bytes = 2 * 2 * 2 * 8 * 64 * 4  # layers, K and V, KV heads, tokens, head_dim, float32
    options = OPTIONS | {"num_gpu_blocks_override": None, "block_size": 8}
    with pytest.raises(OutOfMemoryError) as error:
        LLM(tiny_llama.path, **options, kv_cache_memory_bytes=13 * block_bytes, max_model_len=512)
    for part in ("max_model_len=512", "1 MiB", "208 KiB", "104", "kv_cache_memory_bytes", "in total"):
        assert part in str(error.value)
    with LLM(tiny_llama.path, **options, kv_cache_memory_bytes=13 * block_bytes, max_model_len=104) as llm:
        output = llm.generate(prompts_of(103), GREEDY, use_tqdm=False)[0]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_more_kv_cache_than_there_is_memory(tiny_llama: TinyModel) -> None:
    with pytest.raises(OutOfMemoryError, match="kv_cache_memory_bytes=1152921504606846976"):
        LLM(tiny_llama.path, **OPTIONS | {"num_gpu_blocks_override": None}, kv_cache_memory_bytes=2**60)
    with pytest.raises(OutOfMemoryError, match="swap_space=1e\\+09 GiB"):
        LLM(tiny_llama.path, **OPTIONS, swap_space=1e9)


# ---- prompts and sampling parameters ---------------------------------------------------------------


def test_all_forms_of_a_prompt_give_the_same(llm: LLM) -> None:
    text = "The quick fox"
    ids = llm.get_tokenizer().encode(text)
    forms: list[Any] = [text, {"prompt": text}, {"prompt_token_ids": ids}, ids]
    together = llm.generate(forms, GREEDY, use_tqdm=False)
    alone = [llm.generate(form, GREEDY, use_tqdm=False)[0] for form in forms]
    assert len({tuple(tokens) for tokens in tokens_of(together + alone)}) == 1
    assert [output.prompt for output in together] == [text, text, None, None]
    assert all(output.prompt_token_ids == ids and output.finished for output in together)
    assert together[0].outputs[0].text == llm.get_tokenizer().decode(tokens_of(together)[0])


@pytest.mark.parametrize(
    "prompts",
    [
        "",
        [""],
        [[]],
        ["a", ""],
        ["a", "\ud800"],
        {"prompt_token_ids": []},
        [[320]],
        [[-1]],
        [[2**63]],
        ["a", 7],
        None,
    ],
)
def test_a_malformed_prompt_stops_the_call_before_anything_runs(
    llm: LLM, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#7283, vllm#54195."""
    monkeypatch.setattr(llm.llm_engine, "step", lambda: pytest.fail("a step was run"))
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate(["a"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_a_prompt_of_one_token(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": [5]}, GREEDY, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "one entry for each of the 2 prompts, got 1"),
        ([GREEDY] * 3, "one entry for each of the 2 prompts, got 3"),
        ([GREEDY, None], "must hold SamplingParams values, got None"),
        ({"temperature": 0}, "must be a list with one SamplingParams"),
        ([GREEDY, SamplingParams(stop_token_ids=[320])], r"stop_token_ids .*\[0, 320\).*got 320"),
    ],
)
def test_malformed_sampling_parameters(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_one_sampling_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(tokens) for tokens in tokens_of(outputs)] == [3, 1, 5]


def test_the_default_parameters(llm: LLM) -> None:
    output = llm.generate("a", use_tqdm=False)[0]
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_priorities_need_their_policy(llm: LLM) -> None:
    with pytest.raises(ValueError, match='scheduling_policy="priority"'):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 2])


def test_priorities_decide_who_is_first(tiny_llama: TinyModel) -> None:
    options = OPTIONS | {"scheduling_policy": "priority", "max_num_seqs": 1}
    with LLM(tiny_llama.path, **options) as llm:
        outputs = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False, priority=[2, 0, 1])
        first_tokens = [output.metrics.first_token_ts for output in outputs]
        assert first_tokens[1] < first_tokens[2] < first_tokens[0]
        with pytest.raises(ValueError, match="priority must have one entry for each of the 2 prompts"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1])
        with pytest.raises(ValueError, match="priority must hold int"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, "x"])  # type: ignore[list-item]


# ---- requests that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [None, 1, 10**9])
@pytest.mark.parametrize("length", [511, 512, 513])
def test_prompts_at_the_limit(llm: LLM, length: int, max_tokens: int | None) -> None:
    """vllm#16445, vllm#36789, vllm#33418: the context is 512, and one token at least is generated."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    output, other = llm.generate(prompts_of(length, 4), [params, GREEDY], use_tqdm=False)
    if length == 511:
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")
        assert output.error is None
    else:
        assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
        assert output.outputs[0].token_ids == []
        assert output.error is not None
        assert "512" in output.error
        assert str(length) in output.error
        assert "-" not in output.error
    assert len(other.outputs[0].token_ids) == 8


@pytest.mark.parametrize("max_tokens", [0, -5, True, 1.5])
def test_max_tokens_must_be_positive(max_tokens: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens must be an integer >= 1"):
        SamplingParams(max_tokens=max_tokens)


def test_a_request_larger_than_the_cache_fails_alone(
    tiny_llama: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool holds 32 tokens, and so does the longest request; the context is lowered to that."""
    with LLM(tiny_llama.path, **OPTIONS | {"num_gpu_blocks_override": 2}) as llm:
        outputs = llm.generate(prompts_of(10, 40, 10), GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error is not None
    assert "max_model_len=32" in outputs[1].error
    warnings = [record.message for record in caplog.records if "failed" in record.message]
    assert warnings == [f"1 of 3 requests failed, as their `error` says; the first: {outputs[1].error}"]


# ---- one call after another ------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts_call_after_call(llm: LLM) -> None:
    """transformers#45943: 30 requests through 8 slots, each call with another number of them."""
    lengths = [1 + (11 * i) % 40 for i in range(30)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 9, ignore_eos=True) for i in range(30)]
    alone = [
        llm.generate(prompt, each, use_tqdm=False)[0]
        for prompt, each in zip(prompts_of(*lengths), params, strict=True)
    ]
    for count in (30, 7, 19):
        outputs = llm.generate(prompts_of(*lengths[:count]), params[:count], use_tqdm=False)
        assert tokens_of(outputs) == tokens_of(alone[:count])
        assert [len(output.prompt_token_ids) for output in outputs] == lengths[:count]


def test_ctrl_c_drops_the_call_s_requests_and_leaves_a_usable_llm(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(llm.generate(prompts_of(20, 30), GREEDY, use_tqdm=False))
    free = llm.llm_engine.scheduler.kv.num_free
    execute = llm.llm_engine.worker.execute
    steps = []

    def interrupted(batch: Any) -> Any:
        steps.append(batch.step)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return execute(batch)

    monkeypatch.setattr(llm.llm_engine.worker, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts_of(*range(1, 30)), GREEDY, use_tqdm=False)
    assert len(steps) == 3  # the step under way was finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.scheduler.kv.num_free == free
    monkeypatch.undo()
    outputs = llm.generate(prompts_of(20, 30), GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == expected


def test_a_step_that_fails_leaves_a_usable_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(llm.generate(prompts_of(20, 70), GREEDY, use_tqdm=False))
    execute = llm.llm_engine.worker.execute
    steps = []

    def failing(batch: Any) -> Any:
        steps.append(batch.step)
        if len(steps) == 3:
            raise RuntimeError("the device is on fire")
        return execute(batch)

    monkeypatch.setattr(llm.llm_engine.worker, "execute", failing)
    with pytest.raises(RuntimeError, match="on fire"):
        llm.generate(prompts_of(*range(40, 60)), GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    assert tokens_of(llm.generate(prompts_of(20, 70), GREEDY, use_tqdm=False)) == expected


def test_it_works_in_another_thread(llm: LLM) -> None:
    results: list[list[RequestOutput]] = []
    thread = threading.Thread(target=lambda: results.append(llm.generate("a", GREEDY, use_tqdm=False)))
    thread.start()
    thread.join()
    assert len(results[0][0].outputs[0].token_ids) == 8


# ---- results ---------------------------------------------------------------------------------------


def test_the_progress_bar_is_on_stderr(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Processed prompts: 100%" in err
    assert "est. speed input:" in err
    assert "toks/s, output:" in err
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")


def test_eos_ends_a_text_and_has_no_stop_reason(llm: LLM) -> None:
    tokens = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stop = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=[tokens[3]])
    choice = llm.generate("Hello", stop, use_tqdm=False)[0].outputs[0]
    first = tokens.index(tokens[3])
    assert choice.token_ids == tokens[: first + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", tokens[3])
    assert choice.text == llm.get_tokenizer().decode(tokens[:first])


def test_stop_strings(llm: LLM) -> None:
    full = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = full.text[3:5]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=stop)
    choice = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0]
    assert choice.text == full.text[: full.text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert len(choice.token_ids) < len(full.token_ids)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_seed_repeats_itself_and_none_does_not(tiny_llama: TinyModel) -> None:
    seeded = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)
    unseeded = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    prompts = prompts_of(9, 9)
    runs = []
    for engine_seed in (0, 0, 1):
        with LLM(tiny_llama.path, **OPTIONS, seed=engine_seed) as llm:
            runs.append(
                [
                    tokens_of(llm.generate(prompts, seeded, use_tqdm=False)),
                    tokens_of(llm.generate(prompts, unseeded, use_tqdm=False)),
                    tokens_of(llm.generate(prompts, unseeded, use_tqdm=False)),
                ]
            )
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[2][0]
    assert runs[0][0][0] == runs[0][0][1]
    assert runs[0][1] != runs[2][1]
    unseeded_tokens = [tuple(tokens) for run in runs[0][1:] for tokens in run]
    assert len(set(unseeded_tokens)) == 4


def test_the_prefix_cache_counts_and_changes_nothing(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first, second = (llm.generate(prompts_of(100), GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert tokens_of([first]) == tokens_of([second])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    llm.reset_prefix_cache()
    assert llm.generate(prompts_of(100), GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_prompts_of_different_salts_share_nothing(llm: LLM) -> None:
    llm.reset_prefix_cache()
    (prompt,) = prompts_of(100)
    hits = []
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {"cache_salt": ""}):
        (output,) = llm.generate([{**prompt, **salt}], GREEDY, use_tqdm=False)
        hits.append(output.num_cached_tokens)
        assert output.metrics.num_cached_tokens == output.num_cached_tokens
    assert hits == [0, 0, 0, 96, 96]
    with pytest.raises(ValueError, match="'cache_salt' must be a string, got 1"):
        llm.generate([{**prompt, "cache_salt": 1}], GREEDY, use_tqdm=False)  # type: ignore[list-item]


def test_evicted_blocks_come_back_from_the_cpu(tiny_llama: TinyModel) -> None:
    options: dict[str, Any] = OPTIONS | {"num_gpu_blocks_override": 8, "max_model_len": 128}
    with LLM(tiny_llama.path, **options, swap_space=0.01) as llm:
        first, other = prompts_of(100, 110)
        other["prompt_token_ids"].reverse()
        before = llm.generate(first, GREEDY, use_tqdm=False)[0]
        llm.generate(other, GREEDY, use_tqdm=False)  # needs seven of the eight blocks
        assert llm.get_metrics().num_cached_cpu_blocks >= 5
        costs = llm.llm_engine.scheduler.costs
        costs.prefer_fetch = lambda num_blocks, num_tokens: True  # type: ignore[method-assign]
        after = llm.generate(first, GREEDY, use_tqdm=False)[0]
        counters = llm.get_metrics().counters
        assert counters.cpu_prefix_cache_hits > 0
        assert counters.num_blocks_swapped_in * 16 == counters.cpu_prefix_cache_hits
        assert after.num_cached_tokens == 96
    assert tokens_of([after]) == tokens_of([before])
    assert after.outputs[0].cumulative_logprob == pytest.approx(
        before.outputs[0].cumulative_logprob, abs=1e-4
    )


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemptions_are_counted_by_request_and_by_kind(mode: Any, tiny_llama: TinyModel) -> None:
    """An urgent request takes the only blocks there are from one that runs; that one later goes on."""
    options: dict[str, Any] = OPTIONS | {"num_gpu_blocks_override": 6, "max_model_len": 96}
    options |= {"scheduling_policy": "priority", "preemption_mode": mode, "swap_space": 0.01}
    with LLM(tiny_llama.path, **options) as llm:
        patient, urgent = prompts_of(60, 70)
        urgent["prompt_token_ids"].reverse()  # or else it would share most of its blocks
        expected = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in (patient, urgent)]
        llm.reset_prefix_cache()
        engine = llm.llm_engine
        engine.add_request("patient", patient, GREEDY, 1)
        outputs = {}
        for step in range(100):
            if step == 3:
                engine.add_request("urgent", urgent, GREEDY, 0)
            if step > 3 and not engine.has_unfinished_requests():
                break
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
            if step == 3:
                stats = llm.get_metrics()
                assert stats.num_running == 1
                assert (stats.num_waiting, stats.num_swapped) == ((0, 1) if mode == "swap" else (1, 0))
                assert stats.waiting_reason == "blocks"
        assert tokens_of([outputs["patient"], outputs["urgent"]]) == tokens_of(expected)
        assert list(outputs) == ["urgent", "patient"]
        assert outputs["patient"].metrics.num_preemptions == 1
        assert outputs["urgent"].metrics.num_preemptions == 0
        counters = llm.get_metrics().counters
        by_kind = (counters.num_preemptions_swap, counters.num_preemptions_recompute)
        assert by_kind == ((1, 0) if mode == "swap" else (0, 1))


def test_a_long_prompt_leaves_others_their_pace(tiny_llama: TinyModel) -> None:
    """With a threshold, no step of a running request has more than so many tokens of a long prompt."""
    with LLM(tiny_llama.path, **OPTIONS | {"long_prefill_token_threshold": 10}) as llm:
        engine = llm.llm_engine
        engine.add_request("short", "Hello", GREEDY)
        engine.step()
        engine.add_request("long", prompts_of(60)[0], GREEDY)
        before = engine.scheduler.counters.num_scheduled_tokens
        tokens = []
        for _ in range(6):
            assert {output.request_id for output in engine.step()} >= {"short"}
            now = engine.scheduler.counters.num_scheduled_tokens
            tokens.append(now - before)
            before = now
        assert tokens == [11] * 6
        while engine.has_unfinished_requests():
            engine.step()


def test_times_are_in_order(llm: LLM) -> None:
    metrics = llm.generate("Hello", GREEDY, use_tqdm=False)[0].metrics
    times = [
        metrics.queued_ts,
        metrics.scheduled_ts,
        metrics.first_token_ts,
        metrics.last_token_ts,
        metrics.finished_ts,
    ]
    assert times == sorted(times)
    assert times[0] > 0
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
    assert metrics.num_generation_tokens == 8


def test_metrics_count(tiny_llama: TinyModel) -> None:
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        llm.generate(prompts_of(20, 40), GREEDY, use_tqdm=False)
        stats = llm.get_metrics()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert stats.num_blocks == 64
        counters = stats.counters
        assert (counters.num_prompt_tokens, counters.num_generated_tokens) == (60, 16)
        assert counters.num_finished["length"] == 2


# ---- without a tokenizer, and closed ---------------------------------------------------------------


def test_without_a_tokenizer(tiny_llama: TinyModel, llm: LLM) -> None:
    with LLM(tiny_llama.path, **OPTIONS, skip_tokenizer_init=True) as bare:
        output = bare.generate(prompts_of(9), GREEDY, use_tqdm=False)[0]
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            bare.get_tokenizer()
        with pytest.raises(ValueError, match="needs a tokenizer"):
            bare.generate("text", GREEDY)
    assert output.outputs[0].text == ""
    assert tokens_of([output]) == tokens_of(llm.generate(prompts_of(9), GREEDY, use_tqdm=False))


def test_random_weights_need_no_checkpoint(tiny_llama: TinyModel, tmp_path: Any) -> None:
    shutil.copy(f"{tiny_llama.path}/config.json", tmp_path)
    options = OPTIONS | {"load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **options) as llm:
        assert len(tokens_of(llm.generate(prompts_of(9), GREEDY, use_tqdm=False))[0]) == 8


def test_closing_gives_the_memory_back_and_ends_its_use(tiny_llama: TinyModel) -> None:
    from pagedinfer.runner.memory import MIB

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    options = OPTIONS | {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 256 * MIB}
    llm = LLM(tiny_llama.path, **options)
    llm.llm_engine.worker._runner._cache.blocks.fill_(1.0)  # now it is really there
    before = resident()
    llm.close()
    llm.close()
    assert before - resident() > 250 * MIB
    for prompts in ("a", []):
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate(prompts, GREEDY, use_tqdm=False)


def test_prompts_in_one_step_and_room_to_spare(tiny_llama: TinyModel) -> None:
    """A prompt that is longer than the default budget; the watermark keeps the second one waiting."""
    options = OPTIONS | {"max_num_batched_tokens": None, "num_gpu_blocks_override": 32, "max_model_len": 64}
    with LLM(tiny_llama.path, **options, enable_chunked_prefill=False, watermark=0.9) as llm:
        config = llm.llm_engine.scheduler.config
        assert (config.enable_chunked_prefill, config.watermark) == (False, 0.9)
        engine = llm.llm_engine
        for name in "ab":
            engine.add_request(name, {"prompt_token_ids": [5] * 40}, GREEDY)
        engine.step()
        assert (llm.get_metrics().num_running, llm.get_metrics().num_waiting) == (1, 1)
        while engine.has_unfinished_requests():
            engine.step()
    with pytest.raises(ValueError, match="without chunked prefill"):
        LLM(tiny_llama.path, **options | {"max_num_batched_tokens": 16}, enable_chunked_prefill=False)
