"""What texts have in common: normal forms of prompts, questions and answers, and the ids that follow from them."""

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

Place = TypeVar("Place")

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
INSTRUCTIONS = (
    # Around each question of DAPO-Math-17k.
    re.compile(
        r"\s*Solve the following math problem step by step\. The last line of your response should be of the form "
        r"Answer: \\?\$Answer \(without quotes\) where \\?\$Answer is the answer to the problem\.\s+"
        r'(\S.*?)\s+Remember to put your answer on its own line after "Answer:"\.\s*',
        re.DOTALL,
    ),
    re.compile(rf"\s*(\S.*?)\s*{re.escape(BOXED)}\s*", re.DOTALL),
)
INVISIBLE = dict.fromkeys(map(ord, "\N{SOFT HYPHEN}\N{ZERO WIDTH SPACE}\N{WORD JOINER}\N{ZERO WIDTH NO-BREAK SPACE}"))
INTEGER = re.compile(r"([+\-−]?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?", re.ASCII)
# How a formula is set, never what it says. In this order, in lower case:
SETTING = (
    # spaces, delimiters of mathematics, sizes;
    (re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,!;:()\[\]\s]|\$|~|\s+"), ""),
    # marks that end a phrase, inside the formula or outside, but not those in a number;
    (re.compile(r"(?<!\d)[.,;:!?]|[.,;:!?](?!\d)"), ""),
    # braces around one character; commands for the same thing.
    (re.compile(r"\{([a-z0-9])\}"), r"\1"),
    (re.compile(r"\\[lc]dots"), r"\\dots"),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
)
SHORT = 40
"""Characters of a question, as `folded`, below which it is looked for as a whole text only: it may well be a phrase."""


def normalised(text: str) -> str:
    """Without differences that no reader sees: composed characters (NFC), single spaces, nothing invisible."""
    return " ".join(unicodedata.normalize("NFC", text.translate(INVISIBLE)).split())


def canonical(answer: str) -> str:
    """An integer in its shortest form, or the normalised text of another answer."""
    number = INTEGER.fullmatch(answer.strip())
    if number is None:
        return normalised(answer)
    digits = number[2].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if number[1] in ("-", "−") and digits != "0" else digits


def is_integer(answer: str) -> bool:
    """Whether a canonical answer is an integer."""
    return INTEGER.fullmatch(answer) is not None


def identity(prompt: str, answer: str) -> str:
    """64 bits of a hash of a normalised prompt and its canonical answer, as 16 hexadecimal digits."""
    return hashlib.sha256(f"{prompt}\0{answer}".encode()).hexdigest()[:16]


def bare_question(prompt: str) -> str | None:
    """The question between instructions that are known, or None where there are no such."""
    for pattern in INSTRUCTIONS:
        if match := pattern.fullmatch(prompt):
            return match[1]
    return None


def folded(prompt: str) -> str:
    """What stays of a question without case, spaces, compatibility forms (NFKC) and the setting of its formulas."""
    prompt = normalised(prompt)
    text = unicodedata.normalize("NFKC", bare_question(prompt) or prompt).casefold()
    text = unicodedata.normalize("NFKC", text)
    for pattern, replacement in SETTING:
        text = pattern.sub(replacement, text)
    return text


def finder(questions: Iterable[tuple[str, Place]]) -> Callable[[str], Place | None]:
    """A function from a prompt to the place of the first question that it is, or holds; both compared as `folded`."""
    whole: dict[str, Place] = {}
    beginnings: dict[str, list[str]] = defaultdict(list)
    for question, place in questions:
        text = folded(question)
        if text not in whole and len(text) >= SHORT:
            beginnings[text[:SHORT]].append(text)
        whole.setdefault(text, place)

    def find(prompt: str) -> Place | None:
        text = folded(prompt)
        if text in whole:
            return whole[text]
        for start in range(len(text) - SHORT + 1):
            for question in beginnings.get(text[start : start + SHORT], ()):
                if text.startswith(question, start):
                    return whole[question]
        return None

    return find
