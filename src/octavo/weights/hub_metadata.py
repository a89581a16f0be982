"""What a hub model says about itself, without its weights: config.json, and the headers of its
safetensors or GGUF files, read by range requests.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from octavo.core.errors import ConfigError
from octavo.weights.gguf_header import GGUFHeader
from octavo.weights.gguf_names import ROPE_FACTORS
from octavo.weights.safetensors_folder import read_json_object

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

T = TypeVar("T")

_FIRST_BYTES = 1 << 24
"""Of a GGUF file: its header with the vocabulary takes up to 10 MB or so."""
_MOST_BYTES = 1 << 28


class HubMetadata(NamedTuple):
    """config: config.json. num_bytes: of all tensors, by the type that the files name for them;
    None if there are no safetensors files.
    """

    config: Mapping[str, Any]
    num_bytes: Mapping[str, int] | None


def read_hub_metadata(
    repo_id: str, *, revision: str | None = None, token: str | None = None
) -> HubMetadata:
    """Raises ConfigError if there is no such model or no connection."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import NotASafetensorsRepoError

    path = _asked(
        repo_id,
        lambda: hf_hub_download(repo_id, "config.json", revision=revision, token=token),
    )
    config = read_json_object(Path(path))
    try:
        metadata = _asked(
            repo_id,
            lambda: HfApi().get_safetensors_metadata(repo_id, revision=revision, token=token),
            passes=NotASafetensorsRepoError,
        )
    except NotASafetensorsRepoError:
        return HubMetadata(config, None)
    sizes: dict[str, int] = {}
    for file in metadata.files_metadata.values():
        for tensor in file.tensors.values():
            begin, end = tensor.data_offsets
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + end - begin
    return HubMetadata(config, sizes)


def read_hub_gguf(
    repo_id: str, file: str, *, revision: str | None = None, token: str | None = None
) -> GGUFHeader:
    """Fetches the first bytes until the header is whole; what would be weights is a hole in a file
    that is removed at once. Raises ConfigError.
    """
    from huggingface_hub import HfFileSystem

    system = HfFileSystem(token=token)
    path = f"{repo_id}@{revision}/{file}" if revision else f"{repo_id}/{file}"
    total = _asked(repo_id, lambda: int(system.info(path)["size"]))
    wanted = min(_FIRST_BYTES, total)
    while True:
        content = _asked(repo_id, partial(_first_bytes, system, path, wanted))
        try:
            header = _header(content, total)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the header of {path} can't be read: no file of the {total} bytes that the hub "
                f"says it has can be made here ({error}); pass the model's config.json"
            ) from error
        except ConfigError:
            if wanted in (total, _MOST_BYTES):
                raise
            wanted = min(4 * wanted, total, _MOST_BYTES)
            continue
        header.tensors.pop(ROPE_FACTORS, None)  # its values would be those of the hole
        return header


def _first_bytes(system: HfFileSystem, path: str, count: int) -> bytes:
    with system.open(path, "rb", cache_type="none") as file:  # others read ahead
        content: bytes = file.read(count)
    return content


def _header(content: bytes, total: int) -> GGUFHeader:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        os.truncate(path, total)
        return GGUFHeader(path)


def _asked(repo_id: str, ask: Callable[[], T], passes: type[Exception] | None = None) -> T:
    """passes: an error that the caller knows what to do with."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return ask()
    except GatedRepoError as error:
        raise ConfigError(
            f"the hub model {repo_id} is gated: accept its terms on its page, then set HF_TOKEN or "
            "--hf-token; or pass its config.json"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is neither a local file nor a hub model {repo_id!r}; check the spelling, or "
            "set HF_TOKEN or --hf-token if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"the hub model {repo_id} has no such revision") from error
    except Exception as error:  # the client's HTTP library, and so its errors, differ by version
        if passes is not None and isinstance(error, passes):
            raise
        if isinstance(error, EntryNotFoundError) and "config.json" in str(error):
            raise ConfigError(
                f"the hub model {repo_id} has no config.json; for GGUF files ask for "
                f"{repo_id}/FILE.gguf"
            ) from error
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(
            f"what {repo_id!r} is on the hub can't be read ({reason}): connect, or pass its "
            "config.json"
        ) from error
