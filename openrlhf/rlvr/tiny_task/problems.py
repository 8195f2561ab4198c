"""Arithmetic of four levels, each with its typical slip, and the split into known and held-out problems."""

import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import product

VALIDATION_PER_LEVEL = 128
TRAINING_PER_LEVEL = 64


@dataclass(frozen=True)
class Problem:
    """An expression, its value, and the value that the level's slip gives.

    `identity` is the same for expressions that differ only in the order of their terms or factors.
    """

    level: str
    expression: str
    answer: int
    slip: int
    identity: Hashable

    @property
    def question(self) -> str:
        return f"{self.expression}=?"

    def row(self) -> dict[str, str]:
        """As real prompt data has it."""
        return {"input": self.question, "label": str(self.answer), "datasource": self.level}


@dataclass(frozen=True)
class Split:
    """Problems for training, by level, and those held out for validation, shuffled."""

    known: dict[str, list[Problem]]
    validation: list[Problem]


def all_problems() -> Iterator[Problem]:
    """Every problem there is, easiest level first."""
    for a, b in product(range(1, 100), repeat=2):
        carries = a % 10 + b % 10 > 9
        if b < 10 and not carries:  # forgets the second number
            yield Problem("ones", f"{a}+{b}", a + b, a, frozenset((a, b)))
        elif min(a, b) > 9 and a + b < 100 and not carries:  # adds the second number's ones only
            yield Problem("tens", f"{a}+{b}", a + b, a + b % 10, frozenset((a, b)))
        elif min(a, b) > 9 and a + b < 100:  # drops the carry
            yield Problem("carry", f"{a}+{b}", a + b, a + b - 10, frozenset((a, b)))
    for a, b, c in product(range(1, 10), range(1, 10), range(10)):
        if a * b != a + b:  # adds instead of multiplying
            yield Problem("product", f"{a}*{b}+{c}", a * b + c, a + b + c, (frozenset((a, b)), c))


def split(seed: int) -> Split:
    """Hold out identities of each level; the remaining problems are known in all their forms."""
    chance = random.Random(f"{seed} split")
    levels: dict[str, dict[Hashable, list[Problem]]] = {}
    for problem in all_problems():
        levels.setdefault(problem.level, {}).setdefault(problem.identity, []).append(problem)
    known, validation = {}, []
    for level, forms in levels.items():
        held_out = set(chance.sample(list(forms), VALIDATION_PER_LEVEL))
        validation += [chance.choice(same) for identity, same in forms.items() if identity in held_out]
        known[level] = [one for identity, same in forms.items() if identity not in held_out for one in same]
    chance.shuffle(validation)
    return Split(known, validation)


def training_prompts(known: dict[str, list[Problem]], seed: int) -> list[Problem]:
    """A draw of known problems for reinforcement learning, equally many of each level, shuffled."""
    chance = random.Random(f"{seed} prompts")
    drawn = [problem for problems in known.values() for problem in chance.sample(problems, TRAINING_PER_LEVEL)]
    chance.shuffle(drawn)
    return drawn
