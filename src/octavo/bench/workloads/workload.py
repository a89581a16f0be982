"""What is asked of a server: classes of requests, how long they are, what they share."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from octavo.bench.workloads.arrivals import AnyArrivals, Gamma, endless_arrivals
from octavo.bench.workloads.lengths import AnyLengths, Fixed, Lengths, Uniform, joint
from octavo.bench.workloads.prompts import Api, PromptWriter
from octavo.bench.workloads.request import PlannedRequest, clipped_to_fit
from octavo.bench.workloads.section import Section
from octavo.bench.workloads.vocabulary import Vocabulary

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Prefix(Section):
    """What requests of a class have in common at their beginning. count: different prefixes, of
    which each request has one. Either tokens, of each prefix, on top of those that `in` draws; or
    share, the part of those that is the prefix.
    """

    count: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    tokens: Annotated[float, Field(gt=0, le=10_000_000)] | None = None
    share: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.tokens is None) == (self.share is None):
            raise ValueError("needs either tokens or share, not both")
        return self

    def scaled(self, factor: float) -> Self:
        tokens = None if self.tokens is None else self.tokens * factor
        return self.model_copy(update={"tokens": tokens})


class RequestClass(Section):
    """Requests of one kind. weight: how many of all requests they are, against other classes.
    correlation: of the normal scores of input and output length. burst: so many come at once.
    repetition: the part of a prompt, about, that repeats what stands before it in the same prompt.
    forced: outputs are exactly as long as drawn; otherwise at most.
    """

    name: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(gt=0)] = 1.0
    input: AnyLengths = Field(alias="in")
    output: AnyLengths = Field(alias="out")
    correlation: Annotated[float, Field(gt=-1, lt=1)] = 0.0
    prefix: Prefix | None = None
    burst: Annotated[int, Field(ge=1, le=10_000)] = 1
    repetition: Annotated[float, Field(ge=0, lt=1)] = 0.0
    forced: bool = True

    def scaled(self, factor: float) -> Self:
        update = {
            "input": self.input.scaled(factor),
            "output": self.output.scaled(factor),
            "prefix": self.prefix and self.prefix.scaled(factor),
        }
        return self.model_copy(update=update)

    def mean_lengths(self) -> tuple[float, float]:
        """Input and output tokens, expected."""
        prefix = 0.0 if self.prefix is None else self.prefix.tokens or 0.0
        return prefix + self.input.mean(), self.output.mean()


class Workload(Section):
    """A workload, as its file has it. description: what it stands for, and after whom. arrivals: in
    an open loop, unless the user asks for others.
    """

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    classes: Annotated[tuple[RequestClass, ...], Field(min_length=1, strict=False)]
    arrivals: AnyArrivals = Gamma()

    @field_validator("classes")
    @classmethod
    def _names_differ(cls, classes: tuple[RequestClass, ...]) -> tuple[RequestClass, ...]:
        names = [each.name for each in classes]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice!r} is the name of two classes; give each its own")
        return classes

    @classmethod
    def of_lengths(
        cls, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0
    ) -> Self:
        """One class: lengths uniform within ± range_ratio of these, as vLLM's random dataset. The
        prefix is one for all, and comes on top of input_len.
        """

        def around(length: int) -> Lengths:
            if not range_ratio:
                return Fixed(fixed=length)
            low = max(1, math.ceil(length * (1 - range_ratio)))
            return Uniform(uniform=(low, max(low, math.floor(length * (1 + range_ratio)))))

        spread = f" ±{100 * range_ratio:g} %" if range_ratio else ""
        prefix = f"{prefix_len} shared + " if prefix_len else ""
        only = RequestClass.model_validate(
            {
                "name": "random",
                "in": around(input_len),
                "out": around(output_len),
                "prefix": Prefix(tokens=prefix_len) if prefix_len else None,
            }
        )
        return cls(name=f"{prefix}{input_len}/{output_len}{spread}", classes=(only,))

    def scaled(self, factor: float) -> Self:
        """The same with all lengths times `factor`: their variation, the ratio of input to output
        and what a prefix cache can know stay as they are, but for rounding to whole tokens.
        """
        if factor == 1:
            return self
        by = f"÷{1 / factor:g}" if factor < 1 else f"×{factor:g}"
        classes = tuple(each.scaled(factor) for each in self.classes)
        return self.model_copy(update={"name": f"{self.name} {by}", "classes": classes})

    @property
    def shares_prefixes(self) -> bool:
        """Whether some prompts begin alike."""
        return any(each.prefix is not None for each in self.classes)

    def mean_lengths(self) -> tuple[float, float]:
        """Input and output tokens of a request, expected."""
        total = sum(each.weight for each in self.classes)
        means = [(each.weight / total, *each.mean_lengths()) for each in self.classes]
        return (
            sum(share * input_len for share, input_len, _ in means),
            sum(share * output_len for share, _, output_len in means),
        )

    def requests(
        self,
        *,
        seed: int,
        count: int,
        vocabulary: Vocabulary,
        api: Api = "completions",
        rate: float | None = None,
        burstiness: float | None = None,
        nonce: str = "",
        max_model_len: int | None = None,
        takes_token_ids: bool = True,
    ) -> list[PlannedRequest]:
        """The first `count` requests.

        The same seed gives the same classes, lengths, words and pattern of arrivals, whatever the
        rate, the nonce and the count: two servers, or two settings, can be compared request by
        request. nonce: names the load point; prompts of different nonces share no beginning. rate:
        of an open loop; without one, no request has an arrival. burstiness: of gamma arrivals, see
        `Gamma`, instead of the workload's own. max_model_len: what a prompt and its output may have
        together, in a chat with the template's part; what is longer is shortened in proportion
        and says so (see `clipping`). takes_token_ids: prompts may be ids.
        """
        writer = PromptWriter(
            vocabulary, api, seed=seed, nonce=nonce, takes_token_ids=takes_token_ids
        )
        if max_model_len is not None and api == "chat":
            max_model_len = max(2, max_model_len - vocabulary.chat_overhead)
        shapes = self.shapes(
            seed=seed,
            rate=rate,
            burstiness=burstiness,
            num_special=writer.num_special,
            max_model_len=max_model_len,
        )
        return [
            PlannedRequest(
                index=shape.index,
                class_name=shape.class_name,
                prompt=writer.prompt(
                    writer.shared(shape.prefix, shape.num_shared) if shape.num_shared else [],
                    writer.own(
                        f"{shape.class_name}\0{shape.index}", shape.num_own, shape.repetition
                    ),
                ),
                prompt_len=writer.num_special + shape.num_shared + shape.num_own,
                max_tokens=shape.output_len,
                is_forced=shape.is_forced,
                arrival_s=shape.arrival_s,
                shared_len=shape.known_len,
                clipped_len=shape.clipped_len,
            )
            for shape in islice(shapes, count)
        ]

    def shapes(
        self,
        *,
        seed: int,
        rate: float | None = None,
        burstiness: float | None = None,
        num_special: int = 0,
        max_model_len: int | None = None,
    ) -> Iterator[RequestShape]:
        """Requests without their words, one after another, without end; see `requests`.
        num_special: tokens that prompts have besides words.
        """
        arrivals = self.arrivals if burstiness is None else Gamma(burstiness=burstiness)
        times = None
        if rate is not None:
            event_rate = rate * self._events_per_request
            times = endless_arrivals(arrivals, rate=event_rate, seed=f"{seed}\0arrivals")
        draws = random.Random(f"{seed}\0lengths")
        longest: dict[str, int] = {}  # of each prefix, in the requests so far
        last_event, arrival_s = -1, None
        for index, (event, each) in enumerate(self._members(seed)):
            if event != last_event:
                last_event = event
                arrival_s = None if times is None else next(times)
            draw = _draw(each, draws, num_special, max_model_len)
            prefix = f"{each.name}\0prefix {draw.group}"
            known = longest.get(prefix, 0)
            if draw.num_shared > known:
                longest[prefix] = draw.num_shared
            yield RequestShape(
                index=index,
                class_name=each.name,
                prefix=prefix,
                num_shared=draw.num_shared,
                num_own=draw.num_own,
                repetition=each.repetition,
                output_len=draw.output_len,
                is_forced=each.forced,
                arrival_s=arrival_s,
                known_len=min(known, draw.num_shared),
                clipped_len=draw.clipped_len,
            )

    @property
    def _events_per_request(self) -> float:
        """What comes at once is one event."""
        events = sum(each.weight / each.burst for each in self.classes)
        return events / sum(each.weight for each in self.classes)

    def _members(self, seed: int) -> Iterator[tuple[int, RequestClass]]:
        """Each request's event and class, without end.

        Multiples of the golden ratio fill [0, 1) evenly, so any stretch of requests has its classes
        in nearly their shares: independent draws would leave a class of 5 % out of every third
        forty requests or so.
        """
        ends = list(accumulate(each.weight / each.burst for each in self.classes))
        offset = random.Random(f"{seed}\0classes").random()
        for event in count():
            place = (offset + event * _GOLDEN_RATIO) % 1 * ends[-1]
            each = self.classes[min(bisect_right(ends, place), len(ends) - 1)]
            for _ in range(each.burst):
                yield event, each


class RequestShape(NamedTuple):
    """prefix: a name for what the prompt begins with, num_shared words of it; num_own follow, of
    which about the share `repetition` repeats others. known_len: of the prefix, words that earlier
    requests have, too. The rest as in PlannedRequest.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    class_name: str
    prefix: str
    num_shared: int
    num_own: int
    repetition: float
    output_len: int
    is_forced: bool
    arrival_s: float | None
    known_len: int
    clipped_len: int


@dataclass(frozen=True, slots=True)
class _Draw:
    """Tokens of a request: num_shared and num_own are words; group: which prefix it has."""

    num_shared: int
    num_own: int
    output_len: int
    clipped_len: int
    group: int


def _draw(
    each: RequestClass, draws: random.Random, num_special: int, max_model_len: int | None
) -> _Draw:
    u_in, u_out = joint(draws.gauss(0, 1), draws.gauss(0, 1), each.correlation)
    place = draws.random()
    own = max(1, each.input.tokens_at(u_in) - num_special)
    output_len = each.output.tokens_at(u_out)
    shared = group = 0
    if (prefix := each.prefix) is not None:
        group = int(place * prefix.count)
        if prefix.tokens is not None:
            shared = max(1, round(prefix.tokens))
        elif prefix.share is not None:
            shared = int(prefix.share * own)
            own -= shared
    words = shared + own
    prompt_len, fitting_output = clipped_to_fit(
        num_special + words, output_len, max_model_len, least_prompt_len=num_special + 1
    )
    fitting_words = prompt_len - num_special
    if fitting_words < words:
        shared = shared * fitting_words // words
        own = fitting_words - shared
    clipped_len = words - fitting_words + output_len - fitting_output
    return _Draw(shared, own, fitting_output, clipped_len, group)
