"""Reward of mathematics: 1 where the response's last boxed answer equals the label, else 0.

A response is graded in steps, cheapest first: equal text, equal numbers, and only then math-verify, which runs in a
process of its own (`comparer.py`) because it can take for ever on a hostile answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import torch

from openrlhf.rlvr.rewards.comparer import Comparer

Cause = Literal[
    "same text",
    "same number",
    "equivalent",
    "no answer",
    "no label",
    "other number",
    "not evaluated",
    "too long",
    "not equivalent",
    "timed out",
    "comparison failed",
]

LONGEST_COMPARED = 1000
"""Characters of an answer above which only its text is compared; the longest label in MATH's training set has 159."""

BOX = re.compile(r"\\boxed\s*\{")
# Spacing and size commands, which never change a value; \left and \right stand before a delimiter only.
DECORATION = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,!;: ]|\$|\s+|~")
NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?")
UNEVALUATED = re.compile(r"\d\s*(?:[+*×·]|\\times(?![a-zA-Z])|\\cdot(?![a-zA-Z]))\s*[({]*\d")

_comparer = Comparer()


@dataclass(frozen=True)
class Verdict:
    """What was decided on one response, which answer was found in it (None: none), and why."""

    correct: bool
    answer: str | None
    cause: Cause


def grade(gold: str, response: str) -> Verdict:
    """Compare the final answer of a response with the label.

    A response that never ends its reasoning block or its last box has no answer. If the label is a number, the answer
    must be evaluated: a sum or product of numbers is refused, or repeating the question would be rewarded.
    """
    answer = final_answer(response)
    if answer is None:
        return Verdict(False, None, "no answer")
    if not normalised(gold):
        return Verdict(False, answer, "no label")
    if normalised(answer) == normalised(gold):
        return Verdict(True, answer, "same text")
    expected, found = _number(gold), _number(answer)
    if expected is not None and found is not None:
        return Verdict(True, answer, "same number") if found == expected else Verdict(False, answer, "other number")
    if expected is not None and UNEVALUATED.search(answer):
        return Verdict(False, answer, "not evaluated")
    if max(len(answer), len(gold)) > LONGEST_COMPARED:
        return Verdict(False, answer, "too long")
    cause = _compare(gold, answer)
    return Verdict(cause == "equivalent", answer, cause)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any) -> dict[str, Any]:
    """Upstream's interface of a reward function.

    Args:
        queries: prompt and response as one text, special tokens included.
        prompts: the prompts alone.
        labels: the right answers.

    Returns:
        `rewards` and `scores`, float32 of shape (len(queries),), 1.0 or 0.0; `extra_logs` with `accuracy`, the same.
    """
    verdicts = [
        grade(str(label), response_of(query, prompt))
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    rewards = torch.tensor([float(verdict.correct) for verdict in verdicts])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards}}


def response_of(query: str, prompt: str) -> str:
    """The response in a query. The prompt may be cut at its left, or come back from the tokenizer slightly changed."""
    if query.startswith(prompt):
        return query[len(prompt) :]
    _, found, response = query.partition(prompt[-40:])
    return response if found else query


def final_answer(response: str) -> str | None:
    """Content of the last `\\boxed{}` after the reasoning block, or None if there is none or it does not end."""
    _, ended, rest = response.rpartition("</think>")
    if not ended and "<think>" in response:
        return None
    starts = [match.end() for match in BOX.finditer(rest)]
    end = _closing_brace(rest, starts[-1]) if starts else None
    return rest[starts[-1] : end].strip() or None if end is not None else None


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes one opened just before `start`; escaped braces are content."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def normalised(text: str) -> str:
    """The text without what never changes a value: white space, dollar signs, sizes, kinds of fraction and comma, a
    final full stop."""
    text = DECORATION.sub("", text).replace("{,}", ",").rstrip(".")
    return re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)


def _number(text: str) -> Fraction | None:
    text = normalised(text)
    return Fraction(text.replace(",", "")) if len(text) < 100 and NUMBER.fullmatch(text) else None


def _compare(gold: str, answer: str) -> Cause:
    try:
        return _decided(gold, answer)
    except _Undecided as undecided:
        return undecided.cause


class _Undecided(Exception):
    """No verdict but an accident of the moment, which must not be remembered."""

    def __init__(self, cause: Cause) -> None:
        self.cause = cause


@lru_cache(maxsize=4096)
def _decided(gold: str, answer: str) -> Cause:
    cause = _comparer.compare(gold, answer)
    if cause in ("timed out", "comparison failed"):
        raise _Undecided(cause)
    return cause
