"""`octavo models`: its claims are those of the tests."""

from __future__ import annotations

import json

import pytest

from octavo.cli.main import main
from octavo.models.registry import families
from octavo.weights.gguf_architectures import GGUF_ARCHITECTURES
from support.checkpoints import EXPERT_FAMILIES, FAMILIES
from support.gguf_files import GGUF_FAMILIES


def test_both_forms_name_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "transformers' modules" in text
    assert [row["model_type"] for row in rows] == [family.model_type for family in families()]
    for row in rows:
        (line,) = [line for line in text.splitlines() if f" {row['architecture']} " in line]
        assert line.startswith(row["models"])
        assert line.endswith(row["verified"])
        assert f" {row['gguf'] or '-'} " in line


def test_what_is_said_to_be_verified_is_compared_with_transformers() -> None:
    claimed = {one.model_type for one in families() if one.oracle == "transformers"}
    assert claimed == {*FAMILIES, *EXPERT_FAMILIES}


def test_what_has_a_gguf_name_is_compared_as_a_gguf_file() -> None:
    claimed = {
        model_type
        for one in GGUF_ARCHITECTURES.values()
        for model_type in (one.model_type, *one.others)
    }
    assert claimed - {"internlm2"} == set(GGUF_FAMILIES)  # of which transformers has no module
