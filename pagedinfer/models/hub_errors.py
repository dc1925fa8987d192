"""What the hub client's errors mean, and what to do about them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from pagedinfer.errors import DownloadError

_NETWORK_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for each in _chain(error):
        if isinstance(each, OfflineModeIsEnabled):
            return False
        if isinstance(each, HfHubHTTPError):
            status = each.response.status_code
            return status == 429 or status >= 500
        if _is_network(each) or "Consistency check failed" in str(each):  # a body that is cut short
            return True
    return False


def describe(error: BaseException, repo_id: str, revision: str, name: str, endpoint: str) -> Exception:
    """The error to raise instead, which says what to do.

    Args:
        error: what the client raised.
        repo_id, revision, name: of the model and the file, "" for all files.
        endpoint: the hub's address.
    """
    from huggingface_hub import errors

    what = f"{name} of {repo_id}" if name else repo_id
    for each in _chain(error):
        if isinstance(each, errors.GatedRepoError):
            return DownloadError(
                f"{repo_id} is gated: accept its terms at {endpoint}/{repo_id}, and give a token of that "
                f"account as HF_TOKEN or hf_token"
            )
        if isinstance(each, errors.RevisionNotFoundError):
            return ValueError(f"{repo_id} on {endpoint} has no revision {revision!r}")
        if isinstance(each, errors.RepositoryNotFoundError):
            return ValueError(
                f"there is no folder {repo_id!r}, and no such model on {endpoint}; if it is a private one, "
                f"give a token as HF_TOKEN or hf_token"
            )
        if isinstance(each, errors.HfHubHTTPError):
            status = each.response.status_code
            if status in (401, 403):
                return DownloadError(
                    f"{endpoint} refuses {what} (HTTP {status}): check the token in HF_TOKEN or hf_token"
                )
            return DownloadError(f"{endpoint} answers HTTP {status} for {what}; try again later")
        if isinstance(each, errors.HFValidationError):
            return ValueError(f"{repo_id!r} is neither a folder nor a hub id: {each}")
        if _is_network(each) or "Consistency check failed" in str(each):
            return DownloadError(
                f"{what} cannot be fetched from {endpoint} ({type(each).__name__}: {each}). Check the "
                f"connection and the proxy; HF_ENDPOINT names a mirror; HF_HUB_ETAG_TIMEOUT and "
                f"HF_HUB_DOWNLOAD_TIMEOUT (10 s) give a slow one more time; what has arrived is kept. Or "
                f"give the path of a folder"
            )
    return DownloadError(f"{what} cannot be fetched from {endpoint}: {type(error).__name__}: {error}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_network(error: BaseException) -> bool:
    library = type(error).__module__.partition(".")[0]
    return library in _NETWORK_LIBRARIES or isinstance(error, ConnectionError | TimeoutError)
