"""The source of training prompts: a seeded order, and a number for every draw."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from openrlhf.repeat.seeds import derive


class PromptSource:
    """Upstream's prompt loader, counting the draws made from it.

    A draw's number is its identity: prompts repeat over epochs, numbers do not. Loader position and number of draws
    are one state, which every checkpoint carries.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.draws = 0
        # Whether the current episode has run out, and whether it had when this source was restored.
        self._at_end = self._restored_at_end = False

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._restored_at_end:  # that episode yields nothing more; upstream still counts it as the current one
            self._restored_at_end = False
            return
        self._at_end = False
        for batch in self.loader:
            self.draws += 1
            yield batch
        self._at_end = True

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "draws": self.draws, "at_end": self._at_end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self.draws = state["draws"]
        self._restored_at_end = self._at_end = state["at_end"]


def seeded_datasets(
    prepare: Callable[[Any, Any], tuple[Any, Any, int]], strategy: Any, tokenizer: Any
) -> tuple[PromptSource, Any, int]:
    """Upstream's loaders, made under the run's seed: the shuffle draws its seed from torch when it is constructed.

    Returns:
        The source of training prompts, the evaluation loader or None, and the number of training steps.
    """
    torch.manual_seed(derive(strategy.args.train.seed, "prompts"))
    loader, evaluation, max_steps = prepare(strategy, tokenizer)
    return PromptSource(loader), evaluation, max_steps
