"""What is wrong with a configuration or its inputs, and how that is told to the user."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One fault: `where` (file:line, "command line" or "default"), the key, and what to do about it."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.message}"


class UserError(Exception):
    """Something that the user can put right; its text is all that they are shown."""


class Expected(UserError):
    """A value is not what its flag takes."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, found {found}")


class ConfigError(UserError):
    """All faults of one configuration at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(map(str, self.problems)))
