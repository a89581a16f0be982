from __future__ import annotations

import pytest

from octavo.bench.workloads.vocabulary import Vocabulary
from octavo.text.served_model import ServedModel
from support.served_models import TOKENIZERS, model_named


@pytest.fixture(params=TOKENIZERS)
def model(request: pytest.FixtureRequest) -> ServedModel:
    return model_named(request.param)


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Of byte-level BPE: a few whole words."""
    return Vocabulary.learn(model_named("byte_level_bpe").tokenizer.encode)
