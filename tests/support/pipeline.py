"""Pipelines in one process: a thread for each stage, joined by links, and the engine's loop."""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from octavo.core.model_spec import KVFormat
from octavo.core.request import Request
from octavo.core.step import (
    DraftRequest,
    ScheduledStep,
    StepOutput,
    TokenDelta,
)
from octavo.engine.loop import EngineLoop
from octavo.executor.base import Executor, PendingStep, StepFailedError
from octavo.executor.local import LocalExecutor
from octavo.models.causal_lm import CausalLM
from octavo.models.pipeline_stage import PipelineStage, decoder_to_cut, stages_of
from octavo.models.registry import engine_model
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.ops.native.backend import NativeBackend
from octavo.parallel.links import Link
from octavo.runner.linked_pipeline import LinkedPipeline
from octavo.runner.model_runner import ModelRunner
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft, Speculation
from octavo.runner.stage_runner import StageRunner
from octavo.sampling.sampler import Sampler
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.settings import SchedulerSettings
from octavo.speculative.proposer import Capabilities, DraftTask, Proposer
from octavo.speculative.proposers import Proposers
from octavo.speculative.registry import Target, build_proposers
from octavo.weights import Checkpoint, open_checkpoint
from support.checkpoints import VOCAB_SIZE

BLOCK_SIZE = 4
MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 160
_PATIENCE_S = 60

MakeProposer = Callable[[Target], Proposer]


def configured(**settings: Any) -> MakeProposer:
    """A proposer as --speculative-config names it."""

    def make(target: Target) -> Proposer:
        (proposer,) = build_proposers([settings], target)
        return proposer

    return make


class PipelineExecutor:
    """An Executor of runners with a thread each. What it sends them is pickled, as to processes."""

    def __init__(self, runners: Sequence[StageRunner | ModelRunner]) -> None:
        self.num_blocks = runners[0].num_blocks
        self.max_steps_in_flight = len(runners)
        self.steps: list[ScheduledStep] = []
        self.most_in_flight = 0
        self.errors: list[Exception] = []
        """What stages raised, the last one's not among them."""
        self._num_in_flight = 0
        self._outcomes: list[StepOutput] = []
        self._inboxes: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in runners]
        self._results: SimpleQueue[StepOutput | Exception] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(runner, inbox), daemon=True)
            for runner, inbox in zip(runners, self._inboxes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, step: ScheduledStep) -> PendingStep:
        message = pickle.dumps((step, self._outcomes))
        self._outcomes = []
        self.steps.append(step)
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        for inbox in self._inboxes:
            inbox.put(message)
        return _Pending(self)

    def take_result(self) -> StepOutput:
        result = self._results.get(timeout=_PATIENCE_S)
        self._num_in_flight -= 1
        if isinstance(result, Exception):
            raise StepFailedError(f"{type(result).__name__}: {result}") from result
        self._outcomes.append(result)
        return result

    def shutdown(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE_S)
            assert not thread.is_alive()

    def _run(self, runner: StageRunner | ModelRunner, inbox: SimpleQueue[bytes | None]) -> None:
        is_last = isinstance(runner, ModelRunner)
        while (message := inbox.get()) is not None:
            try:
                output = runner.execute(*pickle.loads(message))
            except Exception as error:  # noqa: BLE001  (as a worker that goes on)
                if is_last:
                    self._results.put(error)
                else:
                    self.errors.append(error)
            else:
                if output is not None:
                    self._results.put(output)


@dataclass
class _Pending:
    executor: PipelineExecutor

    def result(self) -> StepOutput:
        return self.executor.take_result()


@dataclass
class Texts:
    """What an engine gave, by (request id, index)."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[tuple[str, int], list[Any]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: dict[tuple[str, int], Any] = field(default_factory=dict)
    errors: dict[tuple[str, int], str] = field(default_factory=dict)

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            self.tokens[key] += delta.token_ids
            self.logprobs[key] += delta.logprobs or ()
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs[key] = delta.prompt_logprobs
            if delta.error is not None:
                self.errors[key] = delta.error


class Engine:
    """A model's engine: whole, or in stages."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        num_stages: int = 1,
        *,
        num_blocks: int = 200,
        budget: int = 24,
        proposer: MakeProposer | None = None,
        draft_length: int = 4,
        **settings: Any,
    ) -> None:
        """num_stages: 1 is the whole model in this thread. draft_length: of all drafts."""
        self.links: list[Link] = []
        self._kv: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": BLOCK_SIZE,
            "kv_format": KVFormat("float32"),
            "max_num_seqs": MAX_NUM_SEQS,
            "max_model_len": MAX_MODEL_LEN,
        }
        self.executor: Executor
        if num_stages == 1:
            self.runners: list[Any] = [self._last(checkpoint, None, None, proposer)]
            self.executor = LocalExecutor(self.runners[0])
        else:
            self.runners = self._stages(checkpoint, num_stages, proposer)
            self.executor = PipelineExecutor(self.runners)
        self.scheduler: Scheduler = SchedulerSettings(
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            draft_lengths=() if proposer is None else (draft_length,),
            adapts_drafts=False,
            num_stages=num_stages,
            **settings,
        ).build()
        self.loop = EngineLoop(self.scheduler, self.executor, lambda: 0.0, depth=num_stages)
        self.texts = Texts()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.loop.close()
        for link in self.links:
            link.close()

    def run(self, *requests: Request) -> Texts:
        """All of them at once, until they have ended."""
        for request in requests:
            self.loop.add(request)
        for _ in range(2000):
            if not self.loop.has_work:
                return self.texts
            self.texts.take(self.loop.step())
        raise AssertionError("not finished after 2000 steps")

    def _stages(
        self, checkpoint: Checkpoint, num_stages: int, proposer: MakeProposer | None
    ) -> list[StageRunner | ModelRunner]:
        forward = [Link.pair() for _ in range(num_stages - 1)]
        # The last two stages are neighbours: their drafts take the link that they have.
        backward = [*[Link.pair() for _ in range(num_stages - 2)], forward[-1]]
        self.links = [link for pair in (*forward, *backward[:-1]) for link in pair]
        ranges = stages_of(decoder_to_cut(engine_model(checkpoint.config)), num_stages)
        to_last = LinkedPipeline(forward[-1][1], None, [pair[1] for pair in backward])
        last = self._last(checkpoint, ranges[-1], to_last, proposer)
        runners: list[StageRunner | ModelRunner] = []
        ins = [None, *(pair[1] for pair in forward)]
        for blocks, before, (after, _), (drafts, _) in zip(
            ranges, ins, forward, backward, strict=False
        ):
            backend = own_backend()
            stage = PipelineStage(decoder_to_cut(engine_model(checkpoint.config)), blocks)
            load(stage, checkpoint, backend)
            runners.append(
                StageRunner(
                    stage,
                    backend,
                    LinkedPipeline(before, after, [drafts]),
                    taps=last._taps,
                    **self._kv,
                )
            )
        return [*runners, last]

    def _last(
        self,
        checkpoint: Checkpoint,
        blocks: range | None,
        pipeline: LinkedPipeline | None,
        make_proposer: MakeProposer | None,
    ) -> ModelRunner:
        """Of the whole model, or its last stage."""
        backend = own_backend()
        model = decoder_to_cut(engine_model(checkpoint.config))
        sampler = Sampler(backend, max_num_seqs=MAX_NUM_SEQS, vocab_size=VOCAB_SIZE)
        speculation: Proposers | None = None
        if make_proposer is not None:
            target = Target(
                model=model,
                checkpoint=checkpoint,
                backend=backend,
                sampler=sampler,
                dtype="float32",
                quantization=None,
                vocab_size=VOCAB_SIZE,
                open_model=open_checkpoint,
            )
            speculation = Proposers([make_proposer(target)])
        part: CausalLM | PipelineStage = model
        if blocks is not None:
            embeds = speculation is not None and speculation.embeds_tokens
            part = PipelineStage(model, blocks, embeds_drafts=embeds)
        load(part, checkpoint, backend)
        given: Speculation | None = speculation
        return ModelRunner(
            part,
            backend,
            sampler,
            vocab_size=VOCAB_SIZE,
            speculation=given,
            pipeline=pipeline,
            **self._kv,
        )


def own_backend() -> NativeBackend:
    """One for each thread: a pool runs one tape at a time."""
    backend = NativeBackend(threads=1)
    backend.choose("float32", {})
    return backend


def load(model: CausalLM | PipelineStage, checkpoint: Checkpoint, backend: Backend) -> None:
    model.plan_weights(checkpoint, backend, "float32").load()
    model.prepare(backend, MAX_MODEL_LEN)


class FedTrees:
    """A Proposer that knows the texts: its trees have two guesses at each depth, the wrong one
    first, and after some depths no right one. So what is accepted never lies where it must stay.

    texts: whole ones, each of which begins otherwise.
    """

    name = "fed"
    capabilities = Capabilities(makes_trees=True)
    kv_heads: Sequence[tuple[int, int]] = ()
    taps: tuple[int, ...] = ()

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]
        self.num_accepted = 0

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        self._slots = slots

    def begin(self, step: ScheduledStep) -> None:
        pass

    def catch_up(self, tasks: Sequence[DraftTask]) -> None:
        pass

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        return [self._draft(task.slot, task.request) for task in tasks]

    def observe(self, step: ComputedStep) -> None:
        self.num_accepted += sum(map(len, step.accepted.values()))

    def _draft(self, slot: int, request: DraftRequest) -> Draft | None:
        known = self._slots.token_ids[slot, : self._slots.lengths[slot]].tolist()
        following = next(text for text in self._texts if text[: len(known)] == known)[len(known) :]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for depth, right in enumerate(following[: request.length // 2]):
            tokens += [(right + 1) % VOCAB_SIZE, right if depth < len(known) % 4 else right ^ 2]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft(np.array(tokens), np.array(parents)) if tokens else None
