"""An engine in this process, driven step by step, so that each step's tokens and time are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from octavo import assembly
from octavo.config import Config
from octavo.core.clock import monotonic
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ScheduledStep, StepOutput
from octavo.executor.base import Executor, PendingStep
from octavo.ops.backend import Backend

SETTINGS: dict[str, Any] = {
    "enable_prefix_caching": False,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": "512M",
}


@dataclass
class Counts:
    """Steps that only decoded, with every place taken, and what they brought.

    seconds: by the clock of who drives the engine. step_seconds, draft_seconds: what the runner
    says that the steps took, without drafting, and drafting. plain_seconds: of the num_plain_steps
    that verified nothing; they are among step_seconds. num_accepted: drafts of which at least 1, 2,
    ... tokens were accepted.
    """

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    draft_seconds: float = 0.0
    num_plain_steps: int = 0
    plain_seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def acceptance(self) -> float:
        """Of the guessed tokens; 0 if there were none."""
        return sum(self.num_accepted) / max(self.num_draft_tokens, 1)

    def count(self, output: StepOutput, seconds: float) -> None:
        self.num_steps += 1
        self.seconds += seconds
        self.step_seconds += output.seconds
        self.draft_seconds += sum(output.draft_seconds)
        if not any(sequence.num_drafts for sequence in output.sequences):
            self.num_plain_steps += 1
            self.plain_seconds += output.seconds
        for sequence in output.sequences:
            self.num_tokens += len(sequence.token_ids)
            self.num_drafts += sequence.num_drafts > 0
            self.num_draft_tokens += sequence.num_drafts
            for position in range(len(sequence.token_ids) - 1):
                if position == len(self.num_accepted):
                    self.num_accepted.append(0)
                self.num_accepted[position] += 1

    def __add__(self, other: Counts) -> Counts:
        pairs = zip_longest(self.num_accepted, other.num_accepted, fillvalue=0)
        return Counts(
            self.num_steps + other.num_steps,
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
            self.step_seconds + other.step_seconds,
            self.draft_seconds + other.draft_seconds,
            self.num_plain_steps + other.num_plain_steps,
            self.plain_seconds + other.plain_seconds,
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            [one + more for one, more in pairs],
        )


@dataclass
class Played:
    """texts: the token ids that came, by prompt. seconds: of all steps."""

    texts: list[list[int]]
    decoding: Counts = field(default_factory=Counts)
    seconds: float = 0.0


class Engine:
    """A loaded model. speculation: as of --speculative-config. settings: more of the knobs."""

    def __init__(self, model: str, speculation: str, **settings: Any) -> None:
        config = Config.from_flat(
            {"model": model, "speculative_config": speculation, **SETTINGS, **settings}
        )
        checkpoint = assembly.open_model(config.model)
        text = assembly.load_text(config.model, checkpoint)
        self.outputs = _Outputs()
        self.loop, facts = assembly.build_engine(
            config,
            assembly.vocab_size(checkpoint, text),
            checkpoint=checkpoint,
            probe=self.outputs,
        )
        self.served = assembly.served_model(config.model, checkpoint, text, facts)

    def play(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, concurrency: int
    ) -> Played:
        """Continue the prompts, `concurrency` at a time: when one ends, the next one starts."""
        play = self.start(prompts, sampling, concurrency)
        while play.has_work:
            play.step()
        return play.played

    def start(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, concurrency: int
    ) -> Play:
        """The same, step by step, so that engines can take turns at it."""
        played = Played([[] for _ in prompts])
        return Play(self, deque(enumerate(prompts)), sampling, concurrency, played)

    def close(self) -> None:
        self.loop.close()


@dataclass
class Play:
    """Prompts that an engine continues. has_token: of those at work, by number."""

    engine: Engine
    waiting: deque[tuple[int, Sequence[int]]]
    sampling: SamplingParams
    concurrency: int
    played: Played
    has_token: dict[int, bool] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.has_token)

    def step(self) -> None:
        """Raises SystemExit if a request fails."""
        engine, played, has_token = self.engine, self.played, self.has_token
        began = monotonic()
        while self.waiting and len(has_token) < self.concurrency:
            number, token_ids = self.waiting.popleft()
            engine.loop.add(engine.served.request(str(number), token_ids, self.sampling))
            has_token[number] = False
        only_decodes = len(has_token) == self.concurrency and all(has_token.values())
        start = monotonic()
        deltas = engine.loop.step()
        end = monotonic()
        for delta in deltas:
            if delta.error is not None:
                raise SystemExit(f"a request failed: {delta.error}")
            number = int(delta.request_id)
            played.texts[number] += delta.token_ids
            has_token[number] = True
            if delta.finish_reason is not None:
                del has_token[number]
        if only_decodes:
            played.decoding.count(engine.outputs.last, end - start)
        played.seconds += end - began


class _Outputs:
    """A probe that keeps the executor's last answer."""

    last: StepOutput

    def on_backend(self, backend: Backend) -> Backend:
        return backend

    def on_executor(self, executor: Executor) -> Executor:
        return _Watched(executor, self)


class _Watched:
    def __init__(self, executor: Executor, outputs: _Outputs) -> None:
        self._executor = executor
        self._outputs = outputs
        self.num_blocks = executor.num_blocks
        self.max_steps_in_flight = executor.max_steps_in_flight

    def submit(self, step: ScheduledStep) -> PendingStep:
        return _Answer(self._executor.submit(step), self._outputs)

    def shutdown(self) -> None:
        self._executor.shutdown()


@dataclass(frozen=True)
class _Answer:
    pending: PendingStep
    outputs: _Outputs

    def result(self) -> StepOutput:
        self.outputs.last = self.pending.result()
        return self.outputs.last
