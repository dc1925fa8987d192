"""From the name of a model to its folder: a path as it is, or an id of the Hugging Face hub once fetched.

Only the files that loading reads are fetched, into the hub's own cache, by the hub's own client. Its
environment variables count: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_ETAG_TIMEOUT,
HF_HUB_DOWNLOAD_TIMEOUT. Torch-free.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from pagedinfer.config import EngineConfig
from pagedinfer.errors import DownloadError
from pagedinfer.logging import get_logger
from pagedinfer.models.file_names import read_index, weight_file
from pagedinfer.models.gguf_config import gguf_parts, is_gguf
from pagedinfer.models.hub_errors import describe, is_transient
from pagedinfer.models.parallel_tasks import run_in_parallel

logger = get_logger(__name__)

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_GGUF_ID = re.compile(rf"(?P<id>{_ID.pattern})(/(?P<file>.+\.gguf)|:(?P<kind>\w+))")
_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER = re.compile(
    r"tokenizer.*\.(json|model)|.*\.jinja|chat_template\.json|(vocab|merges)\.(json|txt)|added_tokens\.json"
    r"|special_tokens_map\.json|spiece\.model|additional_chat_templates/.*\.jinja"
)
_WAITS = (1.0, 2.0, 4.0)
"""Seconds before each further attempt."""
_CONNECTIONS = 8


def fetch_model(config: EngineConfig) -> Path:
    """The folder of an engine's model; see `resolve_model`."""
    return resolve_model(
        config.model,
        revision=config.revision,
        load_format=config.load_format,
        download_dir=config.download_dir,
        token=config.hf_token,
    )


def fetch_tokenizer(config: EngineConfig, model: Path) -> Path:
    """The folder of its tokenizer, which is the model's if nothing else is said."""
    if config.tokenizer is None:
        return model
    return resolve_model(
        config.tokenizer,
        revision=config.tokenizer_revision,
        load_format="dummy",
        download_dir=config.download_dir,
        token=config.hf_token,
    )


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    download_dir: str | None = None,
    token: str | None = None,
) -> Path:
    """The folder of a model, or its GGUF file.

    Args:
        model: a path, or an id of the hub: "owner/name", and of a GGUF file "owner/name/file.gguf" or, by
            what it is quantized to, "owner/name:Q4_K_M".
        revision: of a hub id: a branch, a tag or a commit; by default "main".
        load_format: which weights to fetch, as for `LLM`; "dummy": none.
        download_dir: the cache to fetch into, instead of the hub client's own.
        token: for models that need one, instead of HF_TOKEN or the one that `hf auth login` stored.

    Raises:
        ValueError: it is neither a path nor an id, or the hub has no such model, revision or file.
        DownloadError: the hub cannot be reached, asks for a token, or breaks off; says what to do.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    gguf = _GGUF_ID.fullmatch(model)
    if gguf is not None:
        repository = _Repository(gguf["id"], revision or "main", download_dir, token)
        return repository.fetch_gguf(gguf["file"], gguf["kind"])
    if not _ID.fullmatch(model):
        raise ValueError(
            f"there is no folder {model!r} to load a model from, and it is no hub id (owner/name)"
        )
    return _Repository(model, revision or "main", download_dir, token).fetch(load_format)


class _Repository:
    """One model on the hub, at one revision."""

    def __init__(self, repo_id: str, revision: str, cache: str | None, token: str | None) -> None:
        self._id, self._revision, self._cache, self._token = repo_id, revision, cache, token
        self._unreachable = ""
        self._timeout = _seconds("HF_HUB_ETAG_TIMEOUT")
        self._endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")

    def fetch(self, load_format: str) -> Path:
        """Brings the files that are needed into the cache; returns their folder."""
        names = self._names()
        if names is None:
            return self._cached("config.json").parent
        if "config.json" not in names or load_format == "gguf":
            files = [name for name in names if is_gguf(name)]
            hint = f"; name one of its GGUF files as {self._id}/{files[0]}" if files else ""
            what = "no config.json" if "config.json" not in names else "more than one file"
            raise ValueError(f"{self._id} on {self._endpoint} has {what}{hint}")
        # The first by the revision's name, which the cache remembers; the rest of that same commit.
        folder = Path(self._download("config.json", self._revision)).parent
        commit = folder.name
        small = [name for name in names if name in _CONFIGS[1:] or _TOKENIZER.fullmatch(name)]
        self._download_all(small, commit)
        self._download_all(self._weights(names, load_format, commit), commit)
        return folder

    def fetch_gguf(self, file: str | None, kind: str | None) -> Path:
        """Brings one GGUF file, or all parts of a split one, into the cache; returns the first."""
        names = self._names()
        if file is None:
            assert kind is not None
            file = self._gguf_of(kind, self._cached_names() if names is None else names)
        if names is None:
            return self._cached(file)
        first, *others = (str(part) for part in gguf_parts(Path(file)))
        absent = [name for name in (first, *others) if name not in names]
        if absent:
            raise ValueError(f"{self._id} on {self._endpoint} has no file {', '.join(absent)}")
        path = Path(self._download(first, self._revision))
        commit = path.parents[len(Path(first).parts) - 1]
        self._download_all(others, commit.name)
        return path

    def _gguf_of(self, kind: str, names: Sequence[str]) -> str:
        """The GGUF file whose name ends in `kind`; of a split one the first part."""
        files = sorted(name for name in names if is_gguf(name))
        ending = re.compile(rf".*[-._/]{re.escape(kind)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
        found = [name for name in files if ending.fullmatch(name)]
        if not found:
            raise ValueError(f"{self._id} has no GGUF file of {kind!r}; it has {', '.join(files) or 'none'}")
        return found[0]

    def _names(self) -> list[str] | None:
        """What the model's files are called; None if only what was fetched before can be had."""
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            self._unreachable = "HF_HUB_OFFLINE is set"
            return None
        try:
            return self._attempt(self._list)
        except DownloadError as error:
            # What was fetched before is as good as what cannot be compared with it.
            self._unreachable = str(error)
            if not self._cached_names():
                raise
            logger.warning("%s; taking the files of %s that were fetched before", error, self._id)
            return None

    def _list(self) -> list[str]:
        from huggingface_hub import HfApi

        info = HfApi(endpoint=self._endpoint, token=self._token).model_info(
            self._id, revision=self._revision, timeout=self._timeout
        )
        return [sibling.rfilename for sibling in info.siblings or ()]

    def _weights(self, names: Sequence[str], load_format: str, commit: str) -> list[str]:
        """The files of weights to fetch: those that the index lists, or the single one."""
        if load_format == "dummy":
            return []
        first = weight_file(load_format, names.__contains__, f"{self._id} on {self._endpoint}")
        if not first.is_index:
            return [first.name]
        listed = sorted(read_index(Path(self._download(first.name, commit))))
        absent = [name for name in listed if name not in names]
        if absent:
            raise ValueError(
                f"{first.name} of {self._id} lists files that are not there: {', '.join(absent)}"
            )
        return listed

    def _download_all(self, names: Sequence[str], commit: str) -> None:
        run_in_parallel([partial(self._download, name, commit) for name in names], _CONNECTIONS)

    def _download(self, name: str, revision: str) -> str:
        from huggingface_hub import hf_hub_download

        return self._attempt(
            lambda: hf_hub_download(
                self._id,
                name,
                revision=revision,
                cache_dir=self._cache,
                token=self._token,
                endpoint=self._endpoint,
                etag_timeout=self._timeout,
            ),
            name,
        )

    def _attempt(self, action: Callable[[], T], name: str = "") -> T:
        """Repeats what fails for reasons that may pass; a download goes on where it broke off."""
        for wait in (*_WAITS, None):
            try:
                return action()
            except Exception as error:  # the client raises errors of several libraries
                if wait is None or not is_transient(error):
                    # Without its cause: that is a hundred lines of the client's, and the message has it.
                    raise describe(error, self._id, self._revision, name, self._endpoint) from None
                logger.warning("%s of %s: %s; trying again in %g s", name or "files", self._id, error, wait)
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _cached(self, name: str) -> Path:
        """A file in the cache.

        Raises:
            DownloadError: it is not there.
        """
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(self._id, name, cache_dir=self._cache, revision=self._revision)
        if not isinstance(file, str):
            raise DownloadError(
                f"{name} of {self._id} at revision {self._revision!r} is not in the cache, and "
                f"{self._unreachable}. Fetch it once with a connection, or give the path of a folder"
            )
        return Path(file)

    def _cached_names(self) -> list[str]:
        """The files in the cache."""
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(
                    self._id, revision=self._revision, cache_dir=self._cache, local_files_only=True
                )
            )
        except Exception:  # nothing of it, or the client's record of what there should be is not met
            return []
        return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _seconds(variable: str, default: float = 10.0) -> float:
    try:
        return float(os.environ.get(variable) or default)
    except ValueError:
        raise ValueError(f"{variable} must be a number of seconds, got {os.environ[variable]!r}") from None
