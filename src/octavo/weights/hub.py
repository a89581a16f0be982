"""Models from the Hugging Face hub: one download call, and errors that say what to do.

HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured by huggingface_hub itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo.core.errors import ConfigError
from octavo.weights.safetensors_folder import NO_PICKLES, PICKLE_SUFFIXES

_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
# Second copies of the same weights: sub-folders ("original/"), Mistral's own "consolidated" format.
_IGNORED = ("*/*", "consolidated*")


def download_model(
    repo_id: str, *, revision: str | None, download_dir: str | None, token: str | None
) -> Path:
    """The local folder of `repo_id` with config, tokenizer and safetensors files."""
    folder = _download(repo_id, _PATTERNS, _IGNORED, revision, download_dir, token)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(_why_no_safetensors(repo_id, revision, token))
    return folder


def download_gguf(
    repo_id: str, file: str, *, revision: str | None, download_dir: str | None, token: str | None
) -> Path:
    """The local path of one GGUF file of `repo_id`."""
    path = _download(repo_id, (file,), (), revision, download_dir, token) / file
    if not path.is_file():
        raise ConfigError(
            f"the hub model {repo_id} has no file {file!r} (or it is not in the local cache); "
            "check its file list on the hub"
        )
    return path


def _download(
    repo_id: str,
    patterns: Sequence[str],
    ignored: Sequence[str],
    revision: str | None,
    download_dir: str | None,
    token: str | None,
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=download_dir,
            token=token,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"the hub model {repo_id} is gated: accept its terms on its page, then set HF_TOKEN "
            "or --hf-token"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is neither a local folder nor a hub model {repo_id!r}; check the spelling, or "
            "set HF_TOKEN or --hf-token if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"the hub model {repo_id} has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{repo_id!r} is no local folder, and as a hub model it is neither in the local cache "
            f"nor can it be fetched ({_reason(error.__cause__ or error)}): connect, or download it "
            "elsewhere and pass the folder's path"
        ) from error
    except Exception as error:  # the client's HTTP library, and so its errors, differ by version
        raise ConfigError(
            f"the hub model {repo_id} could not be downloaded ({_reason(error)}); try again"
        ) from error
    return Path(folder)


def _reason(error: BaseException) -> str:
    """The first line of an error whose kind means more to users than its text."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"


def _why_no_safetensors(repo_id: str, revision: str | None, token: str | None) -> str:
    """Looks at what the repository has instead. Without a connection, only says what is missing."""
    from huggingface_hub import list_repo_files

    try:
        files = list_repo_files(repo_id, revision=revision, token=token)
    except Exception:  # noqa: BLE001  as above; only the message gets less precise
        files = []
    if ggufs := sorted(file for file in files if file.endswith(".gguf")):
        shown = ", ".join(ggufs[:8])
        return (
            f"the hub model {repo_id} has only GGUF weights: ask for {repo_id}/FILE, FILE being "
            f"one of {shown}"
        )
    if any(file.endswith(PICKLE_SUFFIXES) for file in files):
        return f"the hub model {repo_id} has only pickled weights. {NO_PICKLES}"
    return f"the hub model {repo_id} has no safetensors weights; choose another model"
