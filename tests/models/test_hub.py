"""Models by their hub id: what is fetched, and what happens when that goes wrong. No network is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedinfer import LLM, SamplingParams
from pagedinfer.errors import DownloadError
from pagedinfer.models import hub as module
from pagedinfer.models.hub import resolve_model
from tests.models.fake_hub import COMMIT, FakeHub
from tests.tiny_models import make_llama

INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = tmp_path / "served"
    make_llama(folder)
    for stray in ("README.md", "consolidated.safetensors", "onnx/model.onnx", "onnx/config.json", "train.py"):
        (folder / stray).parent.mkdir(exist_ok=True)
        (folder / stray).write_text("{}")
    torch.save({}, folder / "pytorch_model.bin")
    server = FakeHub(folder)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(module, "_WAITS", (0.01, 0.01))
    yield server
    server.close()


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def shards(hub: FakeHub) -> set[str]:
    return set(json.loads((hub.folder / INDEX).read_text())["weight_map"].values())


def test_fetches_what_loading_reads_and_no_more(hub: FakeHub, cache: str) -> None:
    folder = resolve_model("owner/name", download_dir=cache)
    expected = shards(hub) | {
        INDEX,
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert hub.downloaded() == expected
    assert {file.name for file in folder.iterdir()} == expected
    for name in expected:
        assert (folder / name).read_bytes() == (hub.folder / name).read_bytes()
    assert folder.name == COMMIT


def test_the_second_time_nothing_is_fetched(hub: FakeHub, cache: str) -> None:
    folder = resolve_model("owner/name", download_dir=cache)
    hub.requests.clear()
    assert resolve_model("owner/name", download_dir=cache) == folder
    assert hub.downloaded() == set()
    assert sum(hub.requests.values()) == 2  # what there is, and whether the revision is still that commit


@pytest.mark.parametrize(("load_format", "weights"), [("pt", {"pytorch_model.bin"}), ("dummy", set())])
def test_weights_of_the_format_that_was_asked_for(
    hub: FakeHub, cache: str, load_format: str, weights: set[str]
) -> None:
    resolve_model("owner/name", download_dir=cache, load_format=load_format)
    fetched = {name for name in hub.downloaded() if Path(name).suffix in (".safetensors", ".bin")}
    assert fetched == weights


def test_revision(hub: FakeHub, cache: str) -> None:
    assert resolve_model("owner/name", revision="v1", download_dir=cache).name == COMMIT
    assert resolve_model("owner/name", revision=COMMIT, download_dir=cache).name == COMMIT
    with pytest.raises(ValueError, match=r"owner/name on http://127\.0\.0\.1:\d+ has no revision 'v2'"):
        resolve_model("owner/name", revision="v2", download_dir=cache)


def test_unknown_model(hub: FakeHub, cache: str) -> None:
    with pytest.raises(ValueError, match=r"no folder 'owner/other', and no such model on http://127"):
        resolve_model("owner/other", download_dir=cache)


@pytest.mark.parametrize("name", ["/no/such/folder", "./models/a", "a/b/c", "there is none", "~/a/b"])
def test_what_can_be_no_id_is_never_asked_for(hub: FakeHub, name: str) -> None:
    with pytest.raises(ValueError, match=f"there is no folder '{name}'"):
        resolve_model(name)
    assert not hub.requests


def test_a_path_is_taken_as_it_is(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(hub.folder)) == hub.folder
    (tmp_path / "owner/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == Path("owner/name")
    assert not hub.requests


def test_a_gated_model_says_so(hub: FakeHub, cache: str) -> None:
    hub.gated = True
    message = r"owner/name is gated: accept its terms at http://127\.0\.0\.1:\d+/owner/name, .* HF_TOKEN"
    with pytest.raises(DownloadError, match=message):
        resolve_model("owner/name", download_dir=cache)
    with pytest.raises(DownloadError, match=message):
        resolve_model("owner/name", download_dir=cache, token="wrong")
    resolve_model("owner/name", download_dir=cache, token="right")


def test_the_token_of_the_environment_is_sent(
    hub: FakeHub, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated = True
    monkeypatch.setenv("HF_TOKEN", "right")
    resolve_model("owner/name", download_dir=cache)
    assert hub.tokens == {"Bearer right"}


@pytest.mark.parametrize("request_", ["GET files", "HEAD config.json", "GET config.json", f"GET {INDEX}"])
def test_a_failure_that_passes_is_tried_again(hub: FakeHub, cache: str, request_: str) -> None:
    hub.failures[request_] = 2
    resolve_model("owner/name", download_dir=cache)
    assert hub.requests[request_] == 3


def test_a_failure_that_stays_says_what_to_do(hub: FakeHub, cache: str) -> None:
    hub.failures["GET files"] = 10**6
    with pytest.raises(DownloadError, match=r"answers HTTP 503 for owner/name; try again later"):
        resolve_model("owner/name", download_dir=cache)
    assert hub.requests["GET files"] == 3


def test_a_download_goes_on_where_it_broke_off(
    hub: FakeHub, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # what it keeps at least
    name = sorted(shards(hub))[0]
    hub.cuts[name] = 1
    folder = resolve_model("owner/name", download_dir=cache)
    assert (folder / name).read_bytes() == (hub.folder / name).read_bytes()
    [begin] = (int(each.removeprefix("bytes=").rstrip("-")) for each in hub.ranges)
    half = (hub.folder / name).stat().st_size // 2
    assert half - 1024 < begin <= half


def test_nobody_answers(cache: str, hub: FakeHub) -> None:
    hub.close()
    message = (
        r"owner/name cannot be fetched from http://127.*Check the connection.* HF_ENDPOINT names a mirror"
    )
    with pytest.raises(DownloadError, match=message):
        resolve_model("owner/name", download_dir=cache)


def test_a_hub_that_hangs_is_given_up(hub: FakeHub, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.stall.clear()
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    with pytest.raises(DownloadError, match=r"Timeout: .*HF_HUB_ETAG_TIMEOUT"):
        resolve_model("owner/name", download_dir=cache)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="HF_HUB_ETAG_TIMEOUT must be a number of seconds, got 'soon'"):
        resolve_model("owner/name", download_dir=cache)


def test_offline_takes_what_was_fetched_before(
    hub: FakeHub, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        DownloadError, match=r"config\.json of owner/name .* is not in the cache, and HF_HUB_OFFLINE is set"
    ):
        resolve_model("owner/name", download_dir=cache)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = resolve_model("owner/name", download_dir=cache)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert resolve_model("owner/name", download_dir=cache) == folder
    assert not hub.requests


def test_without_a_connection_what_was_fetched_before_will_do(
    hub: FakeHub, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve_model("owner/name", download_dir=cache)
    hub.close()
    assert resolve_model("owner/name", download_dir=cache) == folder
    assert "taking the files of owner/name that were fetched before" in caplog.text


@pytest.mark.parametrize("absent", ["config.json", INDEX, "shard"])
def test_a_model_that_is_not_whole(hub: FakeHub, cache: str, absent: str) -> None:
    name = sorted(shards(hub))[1] if absent == "shard" else absent
    (hub.folder / name).unlink()
    (hub.folder / "pytorch_model.bin").unlink()
    message = {
        "config.json": "has no config.json",
        INDEX: r"there is neither model\.safetensors\.index\.json nor model\.safetensors nor pytorch_model",
        "shard": f"{INDEX} of owner/name lists files that are not there: {name}",
    }[absent]
    with pytest.raises(ValueError, match=message):
        resolve_model("owner/name", download_dir=cache)


@pytest.fixture
def gguf_hub(hub: FakeHub) -> FakeHub:
    """One with GGUF files alone, one of them split."""
    for file in hub.folder.iterdir():
        if file.is_file():
            file.unlink()
    for name in (
        "m-Q8_0.gguf",
        "m-Q4_K_M.gguf",
        "big/m-BF16-00001-of-00002.gguf",
        "big/m-BF16-00002-of-00002.gguf",
    ):
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).write_text(name)
    return hub


@pytest.mark.parametrize("model", ["owner/name:q4_k_m", "owner/name/m-Q4_K_M.gguf"])
def test_one_gguf_file(gguf_hub: FakeHub, cache: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = resolve_model(model, download_dir=cache)
    assert (file.name, file.read_text()) == ("m-Q4_K_M.gguf", "m-Q4_K_M.gguf")
    assert gguf_hub.downloaded() == {"m-Q4_K_M.gguf"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model(model, download_dir=cache) == file


def test_a_split_gguf_file(gguf_hub: FakeHub, cache: str) -> None:
    file = resolve_model("owner/name:BF16", download_dir=cache)
    assert file.name == "m-BF16-00001-of-00002.gguf"
    assert sorted(each.name for each in file.parent.iterdir()) == [file.name, "m-BF16-00002-of-00002.gguf"]


def test_a_repository_of_gguf_files_says_how_to_name_one(gguf_hub: FakeHub, cache: str) -> None:
    with pytest.raises(
        ValueError, match=r"has no config\.json; name one of its GGUF files as owner/name/big/m"
    ):
        resolve_model("owner/name", download_dir=cache)
    (gguf_hub.folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has more than one file; name one of its GGUF files"):
        resolve_model("owner/name", download_dir=cache, load_format="gguf")


def test_a_damaged_index(hub: FakeHub, cache: str) -> None:
    (hub.folder / INDEX).write_text("{}")
    with pytest.raises(ValueError, match=rf"{INDEX} is not an index of a checkpoint's files"):
        resolve_model("owner/name", download_dir=cache)


def test_gguf_files_that_are_not_there(gguf_hub: FakeHub, cache: str) -> None:
    with pytest.raises(
        ValueError, match=r"owner/name has no GGUF file of 'Q2_K'; it has big/m-BF16-.*, m-Q8_0"
    ):
        resolve_model("owner/name:Q2_K", download_dir=cache)
    with pytest.raises(ValueError, match=r"owner/name on http.* has no file other\.gguf"):
        resolve_model("owner/name/other.gguf", download_dir=cache)


def test_an_engine_by_hub_id(hub: FakeHub, cache: str) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "download_dir": cache}
    texts = []
    for model, tokenizer in (("owner/name", None), (str(hub.folder), "owner/name")):
        with LLM(model, tokenizer=tokenizer, **options) as llm:
            texts.append(llm.generate("Hello", greedy, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1] != ""


# CVE-2025-32434
def test_code_in_a_checkpoint_is_not_run(hub: FakeHub, cache: str, tmp_path: Path) -> None:
    """config.json and tokenizer_config.json may name classes that the repository brings along."""
    mischief = tmp_path / "mischief"
    (hub.folder / "code.py").write_text(f"import pathlib; pathlib.Path({str(mischief)!r}).touch()\n")
    names = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", "code.T"]}
    for file in ("config.json", "tokenizer_config.json"):
        content = json.loads((hub.folder / file).read_text())
        (hub.folder / file).write_text(json.dumps(content | {"auto_map": names}))
    with LLM("owner/name", device="cpu", num_gpu_blocks_override=64, download_dir=cache) as llm:
        assert llm.generate("Hello", use_tqdm=False)[0].finished
    assert "code.py" not in hub.downloaded()
    with LLM(str(hub.folder), device="cpu", num_gpu_blocks_override=64) as llm:
        assert llm.generate("Hello", use_tqdm=False)[0].finished
    assert not mischief.exists()
