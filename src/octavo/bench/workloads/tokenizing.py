"""The served model's tokenizer, as far as it can be reached: a file, the server, or its counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.workloads.vocabulary import Count, Encode, Vocabulary
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from octavo.bench.load.target import Target

_TIMEOUT_S = 60
_SAMPLE_WORDS = 24


def encoder_named(tokenizer: str) -> Encode:
    """Of a tokenizer.json, a folder that has one, a GGUF file, or a model by name. Raises
    ConfigError.
    """
    from octavo.assembly import open_model
    from octavo.config import ModelConfig
    from octavo.text.tokenizer import Tokenizer
    from octavo.weights import TextAssets

    path = Path(tokenizer)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if path.suffix == ".json" and path.is_file():
        return Tokenizer.from_assets(TextAssets(path, {}, None)).encode
    return Tokenizer.from_assets(open_model(ModelConfig(model=tokenizer)).text_assets()).encode


def vocabulary_of(target: Target, tokenizer: str | None = None) -> Vocabulary:
    """The vocabulary to write a server's prompts with: from what `tokenizer` names (see
    `encoder_named`), or the server's own /tokenize, or else the prompt tokens that its answers
    count. In a chat, what the template adds is measured with one short request. Raises ConfigError.
    """
    import httpx

    with httpx.Client(headers=target.headers, timeout=_TIMEOUT_S) as client:
        count = _counter(client, target)
        encode = encoder_named(tokenizer) if tokenizer else _server_encoder(client, target)
        if encode is None:
            found = Vocabulary.learn_by_counts(count)
            return replace(found, chat_overhead=found.num_special if target.api == "chat" else 0)
        found = Vocabulary.learn(encode)
        if target.api == "chat":
            sample = [found.starts[0], *found.running[: _SAMPLE_WORDS - 1]]
            overhead = count(found.text(sample)) - len(sample)
            found = replace(found, chat_overhead=max(0, overhead))
        return found


def _server_encoder(client: httpx.Client, target: Target) -> Encode | None:
    """What POST /tokenize does, in the words of vLLM (SGLang, Octavo), llama.cpp, or TGI; None if
    the server has none of them.
    """
    url = target.base_url.removesuffix("/v1") + "/tokenize"
    dialects: tuple[Callable[[str], dict[str, Any]], ...] = (
        lambda text: {"model": target.model, "prompt": text},
        lambda text: {"content": text, "add_special": True},
        lambda text: {"inputs": text},
    )
    for body_of in dialects:

        def encode(text: str, body_of: Callable[[str], dict[str, Any]] = body_of) -> list[int]:
            reply = _post(client, url, body_of(text))
            ids = _ids(reply)
            if not ids:
                raise ConfigError(f"{url} gave no tokens for {text[:40]!r}, but {reply!r:.100}")
            return ids

        try:
            encode("the")
        except ConfigError:
            continue
        return encode
    return None


def _ids(reply: Any) -> list[int]:
    tokens = reply.get("tokens") if isinstance(reply, dict) else reply
    if not isinstance(tokens, list):
        return []
    ids = [token.get("id") if isinstance(token, dict) else token for token in tokens]
    return [i for i in ids if isinstance(i, int)]


def _counter(client: httpx.Client, target: Target) -> Count:
    """Prompt tokens as an answer's usage counts them; in a chat, with the template."""
    path = "/chat/completions" if target.api == "chat" else "/completions"

    def count(text: str) -> int:
        body: dict[str, Any] = {"model": target.model, "max_tokens": 1, "temperature": 0}
        if target.api == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        reply = _post(client, target.base_url + path, body)
        usage = reply.get("usage") if isinstance(reply, dict) else None
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(tokens, int):
            raise ConfigError(
                f"{target.base_url} has no /tokenize and does not count prompt tokens (usage is "
                f"{usage!r:.100}), so that prompts of an exact length can't be written for it; "
                "name the model's tokenizer with --tokenizer"
            )
        return tokens

    return count


def _post(client: httpx.Client, url: str, body: dict[str, Any]) -> Any:
    import httpx

    try:
        response = client.post(url, json=body)
    except httpx.HTTPError as error:
        raise ConfigError(f"{url} can't be reached: {error!r}") from None
    if response.status_code != 200:
        raise ConfigError(f"{url} answered {response.status_code}: {response.text:.200}")
    try:
        return response.json()
    except ValueError:
        raise ConfigError(f"{url} answered no JSON, but {response.text:.100}") from None
