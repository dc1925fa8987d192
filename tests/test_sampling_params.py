from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest

from pagedinfer.sampling_params import RequestOutputKind, SamplingParams

NAN, INF = float("nan"), float("inf")


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop_strings) == (16, 0, None, ())
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert not params.is_greedy


# TGI#2222, TGI PR#544, sglang PR#24874
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1)],
        *[
            (name, value)
            for name in (
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "temperature",
                "top_p",
                "min_p",
            )
            for value in (NAN, INF, -INF, 10**400, "1", None, True, [1.0])
        ],
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 1e-40),  # logits divided by it would be infinite
        ("repetition_penalty", 1e7),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", 2**31),
        ("top_k", None),
        ("n", 0),
        ("n", 16385),
        ("n", True),
        ("seed", 2**63),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 1.0),
        ("min_tokens", -1),
        ("min_tokens", 17),  # above max_tokens
        ("min_tokens", None),
        ("logprobs", -2),
        ("prompt_logprobs", "all"),
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["a\ud800"]),
        ("stop", [1]),
        ("stop", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["abc"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("logit_bias", {"abc": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", [1]),
        ("logits_processors", [1]),
        ("logits_processors", len),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("output_kind", "delta"),
    ],
)
def test_out_of_range_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 1e-10),
        ("temperature", 0),
        ("temperature", np.float32(0.5)),
        ("top_k", -1),
        ("top_k", np.int64(50)),
        ("max_tokens", None),
        ("n", 16384),
        ("logprobs", -1),
        ("seed", -(2**63)),
        ("truncate_prompt_tokens", -1),
    ],
)
def test_in_range_is_kept(field: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{field: value}), field)
    assert kept == value
    assert type(kept) in (int, float, type(None))


def test_message_gives_value_and_range() -> None:
    with pytest.raises(ValueError, match=r"^top_p must be a number in \(0, 1\], got 1\.01$"):
        SamplingParams(top_p=1.01)
    with pytest.raises(ValueError, match=r"^n must be an integer in \[1, 16384\], got 0$"):
        SamplingParams(n=0)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (9.9e-6, True), (1e-5, False), (0.005, False)]
)
def test_greedy_below_a_hundred_thousandth(temperature: float, greedy: bool) -> None:
    params = SamplingParams(temperature=temperature)
    assert params.is_greedy is greedy
    assert params.temperature == temperature


def test_forms_are_normalised() -> None:
    params = SamplingParams(
        stop="end",
        stop_token_ids=[1, np.int64(2)],
        logit_bias={"7": 500, 8: -INF, 9: 10**400},
        seed=-1,
        n=3,
        temperature=0,
    )
    assert params.stop_strings == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {7: 100.0, 8: -100.0, 9: 100.0}
    assert params.seed is None
    assert params.n == 3
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match=r"stop needs the text.*detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_cannot_be_changed_unchecked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_p = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean 'max_tokens'?"),
        ("guided_decoding", "use structured_outputs=StructuredOutputsParams(...)"),
        ("best_of", "vLLM has it, pagedinfer does not (yet): ask for n choices"),
        ("xyzzy", "SamplingParams has no parameter 'xyzzy'"),
    ],
)
def test_an_unknown_name_says_what_to_do_instead(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=re.escape(hint)):
        SamplingParams(**{name: 2})


def test_copies_are_equal() -> None:
    params = SamplingParams(top_k=3, stop=["a"], logit_bias={1: 2.0})
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, top_k=4).top_k == 4


# vllm PR#16529, #54195, PR#9634
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("token_id", [320, 2**63])
def test_token_ids_are_checked_against_the_vocabulary(field: str, token_id: int) -> None:
    def make(token_id: int) -> SamplingParams:
        return SamplingParams(**{field: {token_id: 1.0} if field == "logit_bias" else [token_id]})

    make(319).check_model(vocab_size=320)
    with pytest.raises(ValueError, match=rf"{field} .*\[0, 320\).*{token_id}"):
        make(token_id).check_model(vocab_size=320)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_number_of_logprobs_is_limited(field: str) -> None:
    SamplingParams(**{field: 20}).check_model(320)
    SamplingParams(**{field: -1}).check_model(320, max_logprobs=-1)
    for count, limit in ((21, 20), (-1, 20), (321, -1)):
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: count}).check_model(320, max_logprobs=limit)
