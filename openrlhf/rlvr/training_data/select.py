"""Which prompts to train on and to validate with: pure functions of the rows that there are, not of their order."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from openrlhf.rlvr.training_data.sources import InputError
from openrlhf.rlvr.training_data.texts import (
    BOXED,
    bare_question,
    canonical,
    finder,
    folded,
    identity,
    is_integer,
    normalised,
)

Raw = tuple[str, str, str]
"""Prompt, answer and name of the source of a row."""

Place = TypeVar("Place")

ANSWERS = ("integer", "any")
QUESTIONS = ("whole", "bare", "boxed")
CONFLICTS = ("drop", "refuse")


@dataclass(frozen=True)
class Rules:
    """What is kept, and how it is split.

    Attributes:
        answers: ``integer``, or ``any``.
        question: the prompt as published (``whole``), or without instructions that are known (``bare``), or with the
            benchmarks' instruction to box the answer in their place (``boxed``).
        conflicts: a prompt with different answers is left out (``drop``), or an error (``refuse``).
        train: number of training prompts.
        validation: number of validation prompts, the next ones.
        max_tokens: of a prompt; None: no limit.
    """

    answers: str = "integer"
    question: str = "whole"
    conflicts: str = "drop"
    train: int = 10_000
    validation: int = 1_000
    max_tokens: int | None = 1024


@dataclass(frozen=True)
class Prompt:
    """A row of a training file."""

    id: str
    text: str
    answer: str
    source: str

    def row(self) -> dict[str, str]:
        return {"input": self.text, "label": self.answer, "datasource": self.source, "id": self.id}


@dataclass
class Selection:
    """Prompts by use, and how many each rule took.

    Attributes:
        conflicts: texts of prompts with different answers, with the number of rows of each answer.
        overlaps: prompts that are or hold a benchmark's question, with its place.
    """

    train: list[Prompt] = field(default_factory=list)
    validation: list[Prompt] = field(default_factory=list)
    conflicts: dict[str, Mapping[str, int]] = field(default_factory=dict)
    overlaps: list[tuple[Prompt, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def select(
    rows: Mapping[Raw, int],
    rules: Rules,
    benchmarks: Iterable[tuple[str, Place]] = (),
    tokens: Callable[[str], int] | None = None,
) -> Selection:
    """Deduplicate, filter, order by id and split.

    The id is a hash, so the order is as good as shuffled and stays the same when rows come or go elsewhere in the file.

    Args:
        rows: how often each row occurs.
        rules: what to keep.
        benchmarks: questions that must not be trained on or validated with, and their places.
        tokens: length of a prompt, needed where ``rules.max_tokens`` is not None.

    Raises:
        InputError: conflicts where they are refused, or fewer prompts left than the split wants.
    """
    chosen = Selection()
    prompts = _unique(rows, rules, chosen)
    prompts = _keep(prompts, lambda prompt: bool(prompt.answer), "without_answer", chosen)
    if rules.answers == "integer":
        prompts = _keep(prompts, lambda prompt: is_integer(prompt.answer), "without_integer_answer", chosen)
    find = finder(benchmarks)
    chosen.overlaps = [(prompt, place) for prompt in prompts if (place := find(prompt.text)) is not None]
    overlapping = {prompt.id for prompt, _ in chosen.overlaps}
    prompts = _keep(prompts, lambda prompt: prompt.id not in overlapping, "in_benchmarks", chosen)
    if rules.max_tokens is not None:
        if tokens is None:
            raise InputError("the limit on a prompt's tokens needs a tokenizer")
        limit, count = rules.max_tokens, tokens
        prompts = _keep(prompts, lambda prompt: count(prompt.text) <= limit, "too_long", chosen)
    chosen.counts["left"] = len(prompts)
    _split(prompts, rules, chosen)
    return chosen


def _unique(rows: Mapping[Raw, int], rules: Rules, chosen: Selection) -> list[Prompt]:
    """Prompts with one answer each, in the order of their ids; of texts with one normal form the least one stands."""
    texts: dict[str, tuple[str, str]] = {}
    answers: dict[str, Counter[str]] = {}
    unrecognised = set()
    for (published, answer, source), times in sorted(rows.items()):
        text, known = _as_asked(published, rules.question)
        key = normalised(text)
        texts.setdefault(key, (text, source))
        answers.setdefault(key, Counter())[canonical(answer)] += times
        if not known:
            unrecognised.add(key)
    conflicts = {key: found for key, found in answers.items() if len(found) > 1}
    chosen.conflicts = {texts[key][0]: dict(sorted(found.items())) for key, found in sorted(conflicts.items())}
    if chosen.conflicts and rules.conflicts == "refuse":
        text, found = next(iter(chosen.conflicts.items()))
        raise InputError(
            f"{len(chosen.conflicts)} prompts have different answers, for example {text[:200]!r}: {', '.join(found)}; "
            "correct the data, or leave such prompts out with --conflicts drop"
        )
    chosen.counts = {
        "rows": sum(rows.values()),
        "different_prompts_and_answers": sum(map(len, answers.values())),
        "different_prompts": len(answers),
        **({} if rules.question == "whole" else {"without_known_instruction": len(unrecognised)}),
        "with_different_answers": len(conflicts),
    }
    prompts = [
        Prompt(identity(key, answer), text, answer, source)
        for key, (text, source) in texts.items()
        if key not in conflicts
        for answer in answers[key]
    ]
    return sorted(prompts, key=lambda prompt: (prompt.id, prompt.text))


def _as_asked(published: str, question: str) -> tuple[str, bool]:
    """The text to train with, and whether the instructions around the question were recognised where that matters."""
    if question == "whole":
        return published, True
    bare = bare_question(published)
    text = published if bare is None else bare
    return f"{text}\n{BOXED}" if question == "boxed" else text, bare is not None


def _keep(
    prompts: Sequence[Prompt], wanted: Callable[[Prompt], bool], otherwise: str, chosen: Selection
) -> list[Prompt]:
    kept = [prompt for prompt in prompts if wanted(prompt)]
    chosen.counts[otherwise] = len(prompts) - len(kept)
    return kept


def _split(prompts: Sequence[Prompt], rules: Rules, chosen: Selection) -> None:
    """The first prompts train, the next validate, but none whose question, as `folded`, is a training prompt's too."""
    chosen.train = list(prompts[: rules.train])
    trained = {folded(prompt.text) for prompt in chosen.train}
    others = _keep(
        prompts[rules.train :], lambda one: folded(one.text) not in trained, "like_a_training_prompt", chosen
    )
    chosen.validation = others[: rules.validation]
    found = {"train": len(chosen.train), "validation": len(chosen.validation)}
    chosen.counts |= {**found, "unused": len(others) - len(chosen.validation)}
    for name, wanted in (("train", rules.train), ("validation", rules.validation)):
        if found[name] < wanted:
            raise InputError(
                f"only {found[name]} prompts for --{name} {wanted}; ask for fewer, or keep more. Prompts by rule: "
                + ", ".join(f"{rule} {count}" for rule, count in chosen.counts.items())
            )
