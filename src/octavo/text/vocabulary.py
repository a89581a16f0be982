"""Whether two models mean the same by their token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.weights import TextAssets


def require_same_vocabulary(
    tokenizer: Tokenizer, draft_assets: TextAssets, draft_name: str, *, vocab_size: int
) -> None:
    """Check that a draft model's tokens are the target's. tokenizer: of the target, whose ids below
    vocab_size occur.

    Control tokens are compared as all others are. What the draft model has beyond is no difference:
    it is never given nor asked for such an id. Nor is it one which of the tokens end a text, since
    only the target decides that. Raises ConfigError that names the first difference.
    """
    own, others = _pieces(tokenizer), _pieces(Tokenizer.from_assets(draft_assets))
    different = [i for i in range(vocab_size) if own.get(i) != others.get(i)]
    if different:
        first = different[0]
        raise ConfigError(
            f"the draft model {draft_name} has another vocabulary than the target: token {first} is"
            f" {_shown(others.get(first))} instead of {_shown(own.get(first))}, and "
            f"{len(different)} of {vocab_size} ids differ. Draft with a model that was made with "
            "the target's tokenizer, or by a method that needs none, such as ngram"
        )


def _pieces(tokenizer: Tokenizer) -> dict[int, str]:
    """By id. GGUF files name the rows of a padded output layer [PAD500] and so on: no tokens."""
    vocabulary = tokenizer.vocabulary()
    return {i: piece for piece, i in vocabulary.items() if piece != f"[PAD{i}]"}


def _shown(piece: str | None) -> str:
    return "missing" if piece is None else f"{piece!r:.40}"
