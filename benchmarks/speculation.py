"""What speculation gains, where it can't, and whether both are as the theory says.

    python benchmarks/speculation.py [--only PART ...] [--quick] [--quantization int8]
        [--head PATH] [--rival "NAME=COMMAND" ...] [--json FILE] [--plot FILE]

Parts, each with its arms in turns, and of all rounds the median (the lowest–the highest):

copying      one request at a time over HTTP whose answer is copied from the prompt for the most
             part, and the same with rivals: servers (a command with {port} in it) and programs
             (with {tasks}; see copying.py). "llama.cpp+ngram" is compared with "llama.cpp".
head         one question at a time with a trained head, at temperature 0 and 0.7; what limits it
concurrency  1 to 32 requests at once, adaptive: prose, at temperature 1, in which there is nothing
             to look up, and chat. The arm "off again" shows the noise.
batch        copying, and questions with a trained head, 1 to 32 at once: always 1, 2, ... 8 guessed
             tokens, and as many as pay
theory       copying, one at a time: the speedup, and that of arXiv 2211.17192, theorem 3.8, from
             the acceptance and the costs that were measured

All but the first run in this process and measure decoding: steps in which as many requests as
should decoded, and none computed its prompt. Texts of one seed are compared between the arms.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import yaml

import copying
from copying import Task, in_turn, ratios, spread
from octavo import assembly
from octavo.config import Config
from octavo.core.sampling_params import SamplingParams
from octavo.speculative_config import parse_speculative_config
from stepping import Counts, Engine

WORK = Path(__file__).parent / "workloads" / "speculation.yaml"
PARTS = ("copying", "head", "concurrency", "batch", "theory")
LENGTHS = range(1, 9)
SIZES = (1, 2, 4, 8, 16, 32)
IDLE = '{"method": "ngram", "adaptive": false, "prompt_lookup_min": 64, "prompt_lookup_max": 64}'
"""Hardly ever finds anything: its steps are those of no speculation, timed as those that verify."""
STEPS_IN_TURN = 4
Prompts = list[list[int]]
Rows = list[list[str]]
_Key = TypeVar("_Key")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, metavar="PART")
    parser.add_argument("--model", default="default")
    parser.add_argument("--quantization", help="of Octavo's weights")
    parser.add_argument("--threads", type=int, help="of Octavo")
    parser.add_argument(
        "--head", help="as of --speculative-config: eagle, or JSON that names its model"
    )
    parser.add_argument("--rival", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a quarter of the work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the picture of batch, PNG")
    args = parser.parse_args()
    bench = Bench(args)
    found: dict[str, Any] = {"settings": {**bench.settings, "rounds": bench.rounds}}
    for part in PARTS:
        if part in args.only:
            found[part] = getattr(bench, part)()
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


@dataclass(frozen=True)
class Costs:
    """Of a step while speculating, in steps of no speculation.

    tokens: that it brings. most_tokens: that it would if all guesses were right. draft, verify:
    what it takes; verify is 1 for a step that verifies nothing.
    """

    tokens: float
    most_tokens: float
    draft: float
    verify: float

    @classmethod
    def of(cls, counts: Counts, idle: Counts) -> Costs:
        steps = counts.num_steps
        plain_s = idle.plain_seconds / idle.num_plain_steps
        return cls(
            counts.num_tokens / steps,
            1 + counts.num_draft_tokens / steps,
            counts.draft_seconds / steps / plain_s,
            counts.step_seconds / steps / plain_s,
        )

    @property
    def speedup(self) -> float:
        return self.tokens / (self.draft + self.verify)

    @property
    def figures(self) -> tuple[float, ...]:
        """tokens, draft, verify, speedup; and the speedup if all guesses were right, if drafts
        cost nothing, if verifying cost nothing.
        """
        return (
            self.tokens,
            self.draft,
            self.verify,
            self.speedup,
            self.most_tokens / (self.draft + self.verify),
            self.tokens / self.verify,
            self.tokens / (self.draft + 1),
        )


@dataclass
class Measured:
    """One arm at one load: what it did in each round. whole_rates: all tokens by all seconds,
    prompts and the end with fewer requests included.
    """

    rounds: list[Counts] = field(default_factory=list)
    whole_rates: list[float] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [counts.rate for counts in self.rounds]

    @property
    def total(self) -> Counts:
        return sum(self.rounds, Counts())

    def costs(self, idle: Measured) -> list[Costs]:
        """By round, of one sequence at a time. idle: an arm that verified nothing."""
        return [Costs.of(*pair) for pair in zip(self.rounds, idle.rounds, strict=True)]


Arms = defaultdict[str, Measured]


def arms_by(keys: Iterable[_Key]) -> dict[_Key, Arms]:
    return {key: defaultdict(Measured) for key in keys}


class Bench:
    """The parts, each a method that measures, prints, and returns what goes into the JSON."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = args.model
        self.head_config = args.head
        self.rivals = [copying.rival(text) for text in args.rival]
        self.plot = args.plot
        self.rounds = 1 if args.quick else args.rounds
        given = {"quantization": args.quantization, "threads": args.threads}
        self.settings = {name: value for name, value in given.items() if value is not None}
        work = yaml.safe_load(WORK.read_text(encoding="utf-8"))
        every = 4 if args.quick else 1
        config = Config.from_flat({"model": args.model})
        text = assembly.load_text(config.model, assembly.open_model(config.model))

        def chat(ask: str) -> list[int]:
            return text.chat_template.encode_chat([{"role": "user", "content": ask.strip()}])

        self.tasks = [Task(t["name"], chat(t["ask"]), 160) for t in work["copying"][::every]]
        self.questions: Prompts = [chat(ask) for ask in work["questions"][::every]]
        self.prose: Prompts = [text.tokenizer.encode(start) for start in work["prose"][::every]]

    def copying(self) -> Any:
        flags = ["--model", self.model, "--no-enable-prefix-caching"]
        for name, value in self.settings.items():
            flags += [f"--{name}", str(value)]
        arms = {"octavo": "off", "octavo+ngram": "ngram", "octavo+suffix": "suffix"}
        ours = [copying.octavo(name, config, flags) for name, config in arms.items()]
        warm_up = Task("warm-up", self.questions[0], 32)
        found = copying.measure([*ours, *self.rivals], [warm_up, *self.tasks], self.rounds)
        show("Copying, one request at a time, over HTTP", copying.table(found))
        if self.rivals:
            print(copying.ahead(found, list(arms)))
        plain = found["octavo"]["texts"]
        for name in list(arms)[1:]:
            pairs = zip(plain, found[name]["texts"], strict=True)
            equal = sum(one == other for one, other in pairs)
            print(f"{name}: {equal} of {len(plain)} texts are equal to those of octavo")
        return found

    def head(self) -> Any:
        if self.head_config is None:
            print("head: left out, since there is no --head")
            return None
        rows = [["temperature", "off, tokens/s", "head, tokens/s", "speedup"]]
        costs = [["temperature", "accepted", "tokens a step", "draft", "verify", "so, speedup"]]
        costs[0] += ["if all were accepted", "if drafts were free", "if verifying were free"]
        positions = []
        found: dict[str, Any] = {}
        got = arms_by((0.0, 0.7))
        for engines in self.engines({"off": "off", "idle": IDLE, "head": self.head_config}):
            for temperature, arms in got.items():
                sampling = SamplingParams(temperature=temperature, max_tokens=128)
                self.play(engines, self.questions, sampling, 1, arms)
        for temperature, arms in got.items():
            off, head = arms["off"], arms["head"]
            speedup = spread(ratios(head.rates, off.rates))
            rows.append([f"{temperature}", spread(off.rates), spread(head.rates), speedup])
            each = head.costs(arms["idle"])
            costs.append([f"{temperature}", f"{head.total.acceptance:.0%}"])
            for figure in zip(*(cost.figures for cost in each), strict=True):
                costs[-1].append(f"{median(figure):.2f}")
            shares = [f"{n / head.total.num_drafts:.0%}" for n in head.total.num_accepted]
            positions.append(f"at {temperature}: {', '.join(shares)}")
            found[f"{temperature}"] = as_json(arms)
        show("Questions, one at a time, with a head", rows)
        show("What limits it; seconds are in steps of no speculation", costs)
        print(f"drafts accepted as far as position 1, 2, ...: {'; '.join(positions)}")
        return found

    def concurrency(self) -> Any:
        arms = {"off": "off", "off again": "off", "ngram": "ngram"}
        if self.head_config is not None:
            both = [{"method": "ngram"}, *parse_speculative_config(self.head_config)]
            arms |= {"head": self.head_config, "ngram+head": json.dumps(both)}
        work = {"prose": (self.prose, 1.0), "chat": (self.questions, 0.7)}
        found: dict[str, Any] = {}
        got = {name: arms_by(SIZES) for name in work}
        for engines in self.engines(arms):
            for name, (prompts, temperature) in work.items():
                sampling = SamplingParams(
                    temperature=temperature, seed=1, max_tokens=96, ignore_eos=True
                )
                for size, of_size in got[name].items():
                    some = repeated(prompts, max(size, 8))
                    self.play(engines, some, sampling, size, of_size)
        for name, by_size in got.items():
            rows = [["at once", "off, tokens/s", *list(arms)[1:], "accepted of guessed"]]
            medians: dict[str, float] = {}
            for size, of_size in by_size.items():
                off = of_size["off"].rates
                speedups = {arm: ratios(one.rates, off) for arm, one in of_size.items()}
                guesses = [
                    f"{arm}: {sum(one.total.num_accepted)} of {one.total.num_draft_tokens}"
                    for arm, one in of_size.items()
                    if not arm.startswith("off")
                ]
                cells = [spread(speedups[arm]) for arm in list(arms)[1:]]
                rows.append([str(size), spread(off), *cells, "; ".join(guesses)])
                medians |= {f"{arm} at {size}": median(r) for arm, r in speedups.items()}
                found[f"{name} {size}"] = as_json(of_size)
            show(f"{name.capitalize()}: adaptive speculation against none", rows)
            ratio, where = min((m, w) for w, m in medians.items() if not w.startswith("off"))
            print(f"the lowest: {ratio:.3f}, {where}")
        return found

    def batch(self) -> Any:
        loads = {"Copying, n-grams": ("ngram", [task.token_ids for task in self.tasks], 160)}
        if self.head_config is not None:
            loads["Questions, a trained head"] = (self.head_config, self.questions, 96)
        found: dict[str, Any] = {}
        medians: dict[str, dict[str, list[float]]] = {}
        for name, load in loads.items():
            found[name], medians[name] = self.by_size(name, *load)
        if self.plot is not None:
            from speculation_plot import draw

            weights = self.settings.get("quantization", "weights as stored")
            draw(self.plot, SIZES, medians, f"{self.model}, {weights}, temperature 0")
        return found

    def by_size(
        self, name: str, config: str, prompts: Prompts, max_tokens: int
    ) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """What is measured, and the median speedups of each arm at all sizes."""
        arms = {"off": "off"} | {str(length): fixed(length, config) for length in LENGTHS}
        arms["adaptive"] = config
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        rows = [["at once", "off, tokens/s", *list(arms)[1:]]]
        medians: dict[str, list[float]] = {arm: [] for arm in list(arms)[1:]}
        got = arms_by(SIZES)
        for engines in self.engines(arms):
            for size, of_size in got.items():
                work = repeated(prompts, max(len(prompts), 2 * size))
                self.play(engines, work, sampling, size, of_size)
        for size, of_size in got.items():
            off = of_size["off"].rates
            for arm, values in medians.items():
                values.append(median(ratios(of_size[arm].rates, off)))
            rows.append([str(size), spread(off), *(f"{m[-1]:.2f}" for m in medians.values())])
        show(f"{name}: speedup by guessed tokens and by requests at once", rows)
        return {str(size): as_json(of_size) for size, of_size in got.items()}, medians

    def theory(self) -> Any:
        arms = {"off": "off", "idle": IDLE} | {str(length): fixed(length) for length in LENGTHS}
        sampling = SamplingParams(temperature=0, max_tokens=160)
        titles = ["guessed", "tokens a step", "by one rate", "draft", "verify"]
        rows = [[*titles, "speedup by theory", "measured", "measured / theory"]]
        found: dict[str, Any] = {}
        got: Arms = defaultdict(Measured)
        for engines in self.engines(arms):
            self.play(engines, [task.token_ids for task in self.tasks], sampling, 1, got)
        off, idle = got["off"], got["idle"]
        for length in LENGTHS:
            arm = got[str(length)]
            costs = arm.costs(idle)
            theory = [cost.speedup for cost in costs]
            measured = ratios(arm.rates, off.rates)
            rows.append([str(length), mean(cost.tokens for cost in costs)])
            rows[-1] += [f"{tokens_by_one_rate(arm.total, length):.2f}"]
            rows[-1] += [mean(cost.draft for cost in costs), mean(cost.verify for cost in costs)]
            rows[-1] += [spread(theory), spread(measured), spread(ratios(measured, theory))]
            found[str(length)] = {"theory": theory, "measured": measured}
        show("Copying, one at a time: measured speedup and arXiv 2211.17192, theorem 3.8", rows)
        return found | {"arms": as_json(got)}

    def engines(self, arms: Mapping[str, str]) -> Iterator[dict[str, Engine]]:
        """Of each round, made anew for it: where its memory happens to lie makes an engine some
        percent faster or slower than its like. All are kept for the round, so that they can take
        short turns; each has done something before.
        """
        for number in range(self.rounds):
            with ExitStack() as stack:
                engines = {}
                for name in in_turn(list(arms), number):
                    engine = Engine(self.model, arms[name], **self.settings)
                    stack.enter_context(closing(engine))
                    engine.play(self.questions[:2], SamplingParams(max_tokens=32, temperature=0), 1)
                    engines[name] = engine
                yield {name: engines[name] for name in arms}

    def play(
        self,
        engines: Mapping[str, Engine],
        prompts: Prompts,
        sampling: SamplingParams,
        concurrency: int,
        measured: Arms,
    ) -> None:
        """One more round of `measured`: the arms take turns at a few steps each, since a machine
        that others share has another speed every second. Raises SystemExit if texts differ between
        the arms that should not.
        """
        plays = {name: engines[name].start(prompts, sampling, concurrency) for name in engines}
        for turn in count():
            working = [name for name in in_turn(list(plays), turn) if plays[name].has_work]
            if not working:
                break
            for name in working:
                for _ in range(STEPS_IN_TURN):
                    if plays[name].has_work:
                        plays[name].step()
        played = {name: play.played for name, play in plays.items()}
        for name, one in played.items():
            num_tokens = sum(map(len, one.texts))
            measured[name].rounds.append(one.decoding)
            measured[name].whole_rates.append(num_tokens / one.seconds)
        if sampling.temperature == 0 or sampling.seed is not None:
            check_equal({name: one.texts for name, one in played.items()})


def check_equal(texts: Mapping[str, Prompts]) -> None:
    first, *others = texts
    for name in others:
        if texts[name] != texts[first]:
            raise SystemExit(f"{name} wrote other texts than {first}: speculation isn't lossless")


def fixed(length: int, config: str = "ngram") -> str:
    """Always so many tokens by the method of `config`."""
    (settings,) = parse_speculative_config(config)
    return json.dumps(settings | {"num_speculative_tokens": length, "adaptive": False})


def repeated(prompts: Prompts, count: int) -> Prompts:
    return list(islice(cycle(prompts), count))


def mean(values: Iterable[float]) -> str:
    return f"{fmean(values):.2f}"


def tokens_by_one_rate(counts: Counts, length: int) -> float:
    """Tokens a step if each guess were accepted with the same chance, whatever its position (the
    paper's equation 1), in the share of the steps that had a draft.
    """
    accepted = sum(counts.num_accepted)
    full = counts.num_accepted[length - 1] if len(counts.num_accepted) >= length else 0
    rate = accepted / max(accepted + counts.num_drafts - full, 1)
    tokens = length + 1 if rate == 1 else (1 - rate ** (length + 1)) / (1 - rate)
    share = counts.num_drafts / counts.num_steps
    return share * tokens + 1 - share


def as_json(arms: Mapping[str, Measured]) -> dict[str, Any]:
    return {
        name: {"rounds": [asdict(c) for c in one.rounds], "whole_rates": one.whole_rates}
        for name, one in arms.items()
    }


def show(title: str, rows: Rows) -> None:
    """A table in Markdown."""
    print(f"\n{title}\n")
    for number, row in enumerate(rows):
        print(f"| {' | '.join(row)} |")
        if number == 0:
            print("|---" * len(row) + "|")
    print(flush=True)


if __name__ == "__main__":
    main()
