from __future__ import annotations

from dataclasses import replace

import pytest

from octavo import machine
from octavo.bench import determinism
from octavo.bench.determinism import Result, verify_determinism
from octavo.config import Config
from octavo.llm import LLM, RequestOutput

RESULT = Result((5, 6), (((5, 1, "-0x1.0p+0"),), ((6, 1, "-0x1.8p+0"),)))


def test_differences_are_told_by_their_place() -> None:
    assert RESULT.difference_to(RESULT) is None
    assert RESULT.difference_to(RESULT._replace(token_ids=(5, 7))) == "token 1 is 7 and not 6"
    shorter = Result(RESULT.token_ids[:1], RESULT.logprobs[:1])
    assert RESULT.difference_to(shorter) == "1 tokens and not 2"
    one_bit = Result((5, 6), (RESULT.logprobs[0], ((6, 1, "-0x1.8000000000001p+0"),)))
    assert RESULT.difference_to(one_bit) == "the log-probabilities at token 1 differ"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_tiny_model_passes_under_every_circumstance(backend: str, tiny: str) -> None:
    config = Config.from_flat({"model": tiny, "backend": backend})
    certificate = verify_determinism(config, num_prompts=4, input_len=60, output_len=20)
    assert certificate.passed, certificate.checks
    found = [check.name for check in certificate.checks]
    assert found[:5] == [
        "in a crowd",
        "in chunks of 16 tokens",
        "in chunks of 31 tokens",
        "with prefix hits",
        "after preemption",
    ]
    threads = [f"with {n} thread{'s' if n > 1 else ''}" for n in (1, 2)]
    assert found[5:] == threads[: machine.usable_cpus()]
    for check in certificate.checks:
        assert check.evidence
        assert check.num_sequences == 8
        assert check.num_tokens == 8 * 20
        assert check.num_logprobs >= 8 * 20 * 5
    assert certificate.settings["fingerprint"].startswith("octavo-")


def test_a_circumstance_that_changes_a_token_fails(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = determinism._run

    def broken(llm: LLM, jobs: list[determinism.Job]) -> list[RequestOutput]:
        outputs = run(llm, jobs)
        if len(jobs) > 1:
            outputs[0].outputs[0].token_ids[3] ^= 1
        return outputs

    monkeypatch.setattr(determinism, "_run", broken)
    config = Config.from_flat({"model": tiny})
    certificate = verify_determinism(config, num_prompts=2, input_len=40, output_len=8)
    assert not certificate.passed
    assert all("token 3 is" in (check.failure or "") for check in certificate.checks)


def test_what_did_not_occur_is_not_certified(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 1)
    config = Config.from_flat({"model": tiny})
    certificate = verify_determinism(config, num_prompts=1, input_len=3, output_len=2)
    failures = {check.name: check.failure for check in certificate.checks}
    assert failures["in a crowd"] is None
    for name in ("with prefix hits", "after preemption"):
        assert "did not occur" in (failures[name] or "")
    assert certificate.skipped == ["with 2 threads: there is one CPU to use"]
    assert not certificate.passed


def test_the_certificate_counts_only_what_passed(tiny: str) -> None:
    check = determinism.Check("x", "it did", 1, 2, 3, None)
    certificate = determinism.Certificate({}, [check])
    assert certificate.passed
    certificate.checks.append(replace(check, failure="token 0 is 1 and not 2"))
    assert not certificate.passed
