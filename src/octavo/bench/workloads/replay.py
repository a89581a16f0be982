"""Requests as a file has them: a trace that is played again, or prompts that others collected."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from octavo.bench.workloads.arrivals import Gamma, arrival_times
from octavo.bench.workloads.files import MOONCAKE_BLOCK_LEN, Dropped, Row, read_rows
from octavo.bench.workloads.prompts import Api, PromptWriter
from octavo.bench.workloads.request import PlannedRequest, Prompt, clipped_to_fit
from octavo.bench.workloads.vocabulary import Count, Vocabulary
from octavo.core.errors import ConfigError

_LEAST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_SHAREGPT_TOKENS = 2048
"""vLLM's limits for ShareGPT: the least of prompt and answer, the most of a prompt, and of both."""
_COARSE_MS = 1000
DEFAULT_OUTPUT_LEN = 256
"""Of a prompt whose file does not say, as in vLLM; the model may end before."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Requests from a file. dropped: why rows before the last of them were left out, and how many.
    notes: what else differs from the file, in sentences.
    """

    requests: list[PlannedRequest]
    dropped: Mapping[str, int]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class FileWorkload:
    """A file of requests. kind: its format, one of files.READERS; None: as its first line looks.
    scale: what a trace's lengths are multiplied by. count_tokens: of a text, for files with texts;
    by the tokenizer that the vocabulary was learned from. output_len: where the file does not say.
    """

    path: Path
    kind: str | None = None
    scale: float = 1.0
    count_tokens: Count | None = None
    output_len: int = DEFAULT_OUTPUT_LEN

    def requests(
        self,
        *,
        seed: int,
        count: int | None,
        vocabulary: Vocabulary,
        api: Api = "completions",
        time_scale: float | None = None,
        seconds: float | None = None,
        rate: float | None = None,
        burstiness: float = 1.0,
        nonce: str = "",
        max_model_len: int | None = None,
        takes_token_ids: bool = True,
    ) -> Replay:
        """The first `count` requests that can be sent, in the file's order; all for None.

        time_scale: requests arrive at the file's times, multiplied by this (2: half as fast), and
        those that come later than `seconds` after the file's first are left out. rate:
        they arrive as a gamma process instead. Without both, none has an arrival. A trace whose
        times lie on a grid of a second or more (Mooncake's 3 s, BurstGPT's 1 s) gets each time
        moved to any place in its cell: else requests would come in volleys that nobody sent.

        Lengths become prompts as `PromptWriter` writes them; blocks with equal ids are equal.
        Texts are sent as they are, after a few words that no other prompt has, so that what a
        server knows from an earlier load point is of no use. Raises ConfigError.
        """
        if time_scale is not None and rate is not None:
            raise ConfigError("arrivals come from the file (a time scale) or from a rate, not both")
        if time_scale is not None and not 0 < time_scale < math.inf:
            raise ConfigError(f"the time scale is {time_scale:g}; it must be a number above 0")
        writer = PromptWriter(
            vocabulary, api, seed=seed, nonce=nonce, takes_token_ids=takes_token_ids
        )
        if max_model_len is not None and api == "chat":
            max_model_len = max(2, max_model_len - vocabulary.chat_overhead)
        dropped = Dropped()
        notes: list[str] = []
        planner = _Planner(self, writer, api, max_model_len, dropped)
        rows = self._rows(dropped)
        if time_scale is None:
            rows = (replace(row, time_s=None) for row in rows)
        else:
            if seconds is not None:
                rows = _begun_within(rows, seconds / time_scale)
            rows = iter(_by_arrival(self.path, list(islice(rows, count)), time_scale, seed, notes))
        planned: list[PlannedRequest] = []
        for row in rows:
            request = planner.request(row, len(planned))
            if request is not None:
                planned.append(request)
                if len(planned) == count:
                    break
        if not planned:
            raise ConfigError(f"{self.path} has no request that can be sent: {dict(dropped)}")
        if rate is not None:
            arrivals = Gamma(burstiness=burstiness)
            times = arrival_times(arrivals, rate=rate, count=len(planned), seed=f"{seed}\0arrivals")
            planned = [replace(p, arrival_s=t) for p, t in zip(planned, times, strict=True)]
        if count is not None and len(planned) < count:
            notes.append(f"{self.path.name} has {len(planned)} requests of the {count} asked for")
        return Replay(requests=planned, dropped=dict(dropped), notes=notes)

    def _rows(self, dropped: Dropped) -> Iterator[Row]:
        """Those that ask for something."""
        for row in read_rows(self.path, self.kind, dropped):
            if row.text is None and not (row.input_len and row.output_len):
                dropped["no input or no output tokens"] += 1
            else:
                yield row


class _Planner:
    """From rows to requests; remembers which blocks came before."""

    def __init__(
        self,
        workload: FileWorkload,
        writer: PromptWriter,
        api: Api,
        max_model_len: int | None,
        dropped: Dropped,
    ) -> None:
        self._workload = workload
        self._writer = writer
        self._api = api
        self._max_model_len = max_model_len
        self._dropped = dropped
        self._known_blocks: set[int] = set()
        self._block_len = max(1, round(MOONCAKE_BLOCK_LEN * workload.scale))

    def request(self, row: Row, index: int) -> PlannedRequest | None:
        """None if the row is dropped."""
        if row.text is not None:
            return self._of_text(row, row.text, index)
        num_special = self._writer.num_special
        scale = self._workload.scale
        input_len = max(num_special + 1, round(scale * (row.input_len or 0)))
        output_len = max(1, round(scale * (row.output_len or 0)))
        prompt_len, max_tokens = clipped_to_fit(
            input_len, output_len, self._max_model_len, least_prompt_len=num_special + 1
        )
        words, shared_len = self._words(row, index, prompt_len - num_special)
        return PlannedRequest(
            index=index,
            class_name=self._workload.path.stem,
            prompt=self._writer.prompt([], words),
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            arrival_s=row.time_s,
            shared_len=shared_len,
            clipped_len=input_len - prompt_len + output_len - max_tokens,
        )

    def _words(self, row: Row, index: int, num_words: int) -> tuple[list[int], int]:
        """The prompt's words, and how many of them earlier prompts have."""
        words: list[int] = []
        shared_len = 0
        for block_id in row.block_ids:
            length = min(self._block_len, num_words - len(words))
            if not length:
                break
            if block_id in self._known_blocks and shared_len == len(words):
                shared_len += length
            self._known_blocks.add(block_id)
            words += self._writer.own(f"block\0{block_id}", length)
        if len(words) < num_words:
            words += self._writer.own(f"rest\0{index}", num_words - len(words))
        return words, shared_len

    def _of_text(self, row: Row, text: str, index: int) -> PlannedRequest | None:
        count = self._workload.count_tokens
        if count is None:
            raise ConfigError(
                f"{self._workload.path} has texts, whose tokens must be counted: name the model's "
                "tokenizer with --tokenizer"
            )
        vocabulary = self._writer.vocabulary
        output_len = row.output_len
        if row.answer is not None:
            output_len = count(row.answer) - vocabulary.num_special
            prompt_len = count(text) - vocabulary.num_special
            if min(prompt_len, output_len) < _LEAST_TOKENS:
                self._dropped[f"fewer than {_LEAST_TOKENS} tokens"] += 1
                return None
            if prompt_len > _MOST_PROMPT_TOKENS or prompt_len + output_len > _MOST_SHAREGPT_TOKENS:
                self._dropped[
                    f"more than {_MOST_PROMPT_TOKENS} tokens, or {_MOST_SHAREGPT_TOKENS} with the "
                    "answer"
                ] += 1
                return None
        is_forced = output_len is not None
        max_tokens = self._workload.output_len if output_len is None else output_len
        number = vocabulary.text(self._writer.number_words(f"text\0{index}"))
        text = f"{number}\n\n{text}"
        prompt_len = count(text) - vocabulary.num_special + self._writer.num_special
        if self._max_model_len is not None and prompt_len + max_tokens > self._max_model_len:
            self._dropped[f"more than the context's {self._max_model_len} tokens"] += 1
            return None
        if not max_tokens:
            self._dropped["no output tokens"] += 1
            return None
        prompt: Prompt = ({"role": "user", "content": text},) if self._api == "chat" else text
        return PlannedRequest(
            index=index,
            class_name=self._workload.path.stem,
            prompt=prompt,
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            is_forced=is_forced,
        )


def _begun_within(rows: Iterable[Row], seconds: float) -> Iterator[Row]:
    """Those that come at most so long after the file's first, and those without a time."""
    last_s = None
    for row in rows:
        if row.time_s is not None:
            last_s = row.time_s + seconds if last_s is None else last_s
            if row.time_s > last_s:
                continue
        yield row


def _by_arrival(
    path: Path, rows: Sequence[Row], time_scale: float, seed: int, notes: list[str]
) -> list[Row]:
    """In the order of their times, which begin at zero."""
    known = [row.time_s for row in rows if row.time_s is not None]
    if len(known) < len(rows):
        raise ConfigError(f"{path} has no times of arrival; give a rate or a concurrency instead")
    start = min(known, default=0.0)
    offsets = [time - start for time in known]
    grid_s = _grid_ms(offsets) / 1000
    if grid_s:
        rng = random.Random(f"{seed}\0grid")
        offsets = [offset + grid_s * rng.random() for offset in offsets]
        notes.append(f"times of a grid of {grid_s:g} s were moved within their cells")
    timed = sorted(zip(offsets, rows, strict=True), key=lambda pair: pair[0])
    return [replace(row, time_s=time_scale * offset) for offset, row in timed]


def _grid_ms(offsets_s: Sequence[float]) -> int:
    """The step of the grid on which all times lie, if it is a coarse one; else 0."""
    step = math.gcd(*(round(1000 * offset) for offset in offsets_s))
    return step if step >= _COARSE_MS else 0
