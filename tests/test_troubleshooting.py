"""docs/troubleshooting.md: each of its messages, provoked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors

from pagedinfer.config import EngineConfig
from pagedinfer.device_check import CudaDevice, _no_gpu, check_cuda_device, kernel_problem
from pagedinfer.engine.scheduler import Scheduler, SchedulerConfig
from pagedinfer.kernel_library import BuildInfo, _load_problem
from pagedinfer.models.hub import fetch_model
from pagedinfer.models.hub_errors import describe
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.runner import worker as worker_module
from pagedinfer.runner.memory import GIB, Memory, size_kv_cache
from pagedinfer.runner.worker import Worker
from tests.conftest import TinyModel
from tests.engine.rig import make_request, prompt_of

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\*\*`(.*)`\*\*$", GUIDE, re.MULTILINE)

CUDA_BUILD = BuildInfo("2.13.0", "13.0.88", ("80-real",), "GNU 12")
H200 = CudaDevice("NVIDIA H200", (9, 0), (13, 0))


class Provoke:
    """One method for each message, by the order of the guide; each returns or raises the message."""

    def __init__(
        self, tiny: TinyModel, patch: pytest.MonkeyPatch, folder: Path, log: pytest.LogCaptureFixture
    ) -> None:
        self.tiny, self.patch, self.folder, self.log = tiny, patch, folder, log

    def worker(self, **options: Any) -> None:
        config = EngineConfig(model=self.tiny.path, device="cpu", **options)
        Worker(config, ModelConfig.from_pretrained(self.tiny.path)).close()

    def cache(self, available: int, max_model_len: int | None) -> None:
        size_kv_cache(
            available_bytes=available,
            block_bytes=1000,
            block_size=16,
            model_max_len=4096,
            max_model_len=max_model_len,
            num_blocks_override=None,
            memory=Memory(GIB, GIB),
            parameter="kv_cache_memory_bytes",
        )

    def request(self, prompt: int, max_tokens: int) -> None:
        scheduler = Scheduler(SchedulerConfig(num_blocks=2, max_model_len=48))
        scheduler.add_request(make_request("r", prompt_of(prompt), max_tokens=max_tokens))

    def hub(self, error: type[Exception]) -> Exception:
        raised = error.__new__(error)
        return describe(raised, "owner/name", "main", "", "https://huggingface.co")

    def config(self, **options: Any) -> None:
        ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"], **options})

    def small_memory(self) -> None:
        self.patch.setattr(worker_module, "cpu_memory", lambda: Memory(1000, 1000))
        self.worker()

    def no_cuda_build(self) -> None:
        self.patch.setattr(torch.version, "cuda", None)
        check_cuda_device()

    def busy_cores(self) -> str:
        self.patch.setattr("os.getloadavg", lambda: (1e3, 0.0, 0.0))
        self.log.clear()
        self.worker(num_gpu_blocks_override=4, load_format="dummy")
        return self.log.text

    def other_tensors(self) -> None:
        mixed = ModelConfig.from_pretrained(self.tiny.path)
        assert mixed.options["num_hidden_layers"] > 1
        text = (Path(self.tiny.path) / "config.json").read_text()
        layers = f'"num_hidden_layers": {mixed.num_layers}'
        (self.folder / "config.json").write_text(text.replace(layers, '"num_hidden_layers": 1'))
        for file in Path(self.tiny.path).glob("*.safetensors*"):
            (self.folder / file.name).write_bytes(file.read_bytes())
        config = EngineConfig(model=str(self.folder), device="cpu", skip_tokenizer_init=True)
        Worker(config, ModelConfig.from_pretrained(self.folder))


WAYS: list[Callable[[Provoke], object]] = [
    lambda p: _load_problem("2.13.0", None, False),
    lambda p: _load_problem("2.9.1", CUDA_BUILD, True),
    Provoke.no_cuda_build,
    lambda p: _no_gpu(None, "13.0"),
    lambda p: _no_gpu((12, 4), "13.0"),
    lambda p: _no_gpu((13, 0), "13.0"),
    lambda p: kernel_problem(H200, BuildInfo("2.13.0", None, (), "GNU 12")),
    lambda p: kernel_problem(H200, CUDA_BUILD),
    lambda p: kernel_problem(CudaDevice("NVIDIA A100", (8, 0), (12, 4)), CUDA_BUILD),
    Provoke.small_memory,
    lambda p: p.cache(0, None),
    lambda p: p.cache(16_000, 4096),
    lambda p: p.worker(swap_space=1e6),
    lambda p: p.request(60, 4),
    lambda p: p.request(20, 28),
    lambda p: fetch_model(EngineConfig(model="./modles/llama")),
    lambda p: p.hub(errors.RepositoryNotFoundError),
    lambda p: p.hub(errors.GatedRepoError),
    lambda p: p.hub(ConnectionError),
    lambda p: ModelConfig.from_dict({"architectures": ["MambaForCausalLM"]}),
    lambda p: p.config(quantization_config={"quant_method": "gptq"}),
    Provoke.other_tensors,
    Provoke.busy_cores,
]


@pytest.mark.parametrize(("message", "way"), list(zip(MESSAGES, WAYS, strict=True)), ids=MESSAGES)
def test_the_message_is_what_one_sees(
    message: str,
    way: Callable[[Provoke], object],
    tiny_llama: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        seen = str(way(Provoke(tiny_llama, monkeypatch, tmp_path, caplog)))
    except Exception as error:
        seen = str(error)
    assert message in seen


def test_every_message_has_a_remedy() -> None:
    for entry in re.split(r"^\*\*`.*`\*\*$", GUIDE, flags=re.MULTILINE)[1:]:
        text = entry.partition("\n## ")[0].strip()
        assert len(text) > 30


def test_every_environment_variable_is_explained() -> None:
    sources = [*ROOT.glob("pagedinfer/**/*.py"), *ROOT.glob("csrc/**/*.cpp")]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    read = set(re.findall(r'"(PAGEDINFER_[A-Z_]+)"', text))
    assert "PAGEDINFER_CACHE_ROOT" in read
    explained = set(re.findall(r"^\| `(PAGEDINFER_[A-Z_]+)` \|", GUIDE, re.MULTILINE))
    assert explained == read
