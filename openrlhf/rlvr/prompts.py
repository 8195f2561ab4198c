"""Training prompts with stable identities, and the source that owns all state of sampling."""

import hashlib
import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from openrlhf.datasets import PromptDataset
from openrlhf.repeat.prompts import PromptSource
from openrlhf.rlvr.allocation import Allocation, PromptStatistics
from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.ragged import is_ragged
from openrlhf.trainer.ppo_utils.experience import Experience


@settings("data")
class PromptIdentity:
    """What tells prompts apart."""

    id_key: str | None = flag(None, "column with a unique id of each prompt; default: a hash of prompt and label")


class IdentifiedPrompts(PromptDataset):
    """Upstream's prompts, each item followed by the prompt's identity.

    Args:
        rows: the data set, with the column ``--data.id_key`` where that is given.

    Raises:
        ValueError: two rows have one identity and ``--algo.allocation.duplicates`` does not merge them, or a row has
            no id.
    """

    def __init__(self, rows: Any, tokenizer: Any, strategy: Any, **kwargs: Any) -> None:
        super().__init__(rows, tokenizer, strategy, **kwargs)
        key = PromptIdentity.of(strategy.args).id_key  # type: ignore[attr-defined]
        if key is None:
            columns = zip(self.prompts, self.labels, self.images, strict=True)
            self.ids = [identity(prompt, label, images) for prompt, label, images in columns]
        else:
            self.ids = _column(rows, key)
        allocation: Allocation = Allocation.of(strategy.args)  # type: ignore[attr-defined]
        if allocation.strategy and allocation.duplicates == "refuse":
            _refuse_duplicates(self.ids, key)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*super().__getitem__(index), self.ids[index])

    def collate_fn(self, items: Sequence[tuple[Any, ...]]) -> tuple[list[Any], ...]:
        return tuple(map(list, zip(*items, strict=True)))


def identity(prompt: str, label: Any, images: Any = None) -> str:
    """64 bits of a hash of a prompt, as the engine sees it, its label, and the names of its images if it has any."""
    parts = [prompt, str(label)] if images is None else [prompt, str(label), str(images)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _column(rows: Any, key: str) -> list[str]:
    if key not in rows.column_names:
        raise ValueError(
            f"--data.id_key {key}: no such column in the prompts; they have {', '.join(rows.column_names)}"
        )
    ids = rows[key]
    missing = [row for row, one in enumerate(ids, 1) if one is None or one == ""]
    if missing:
        raise ValueError(f"--data.id_key {key}: row {missing[0]} of the prompts has none ({len(missing)} in all)")
    return [str(one) for one in ids]


def _refuse_duplicates(ids: Sequence[str], key: str | None) -> None:
    rows = defaultdict(list)
    for row, one in enumerate(ids, 1):
        rows[one].append(row)
    doubled = [found for found in rows.values() if len(found) > 1]
    if doubled:
        what = f"id in column {key}" if key else "prompt and label"
        first, second, *_ = doubled[0]
        raise ValueError(
            f"--data.prompt_dataset: rows {first} and {second} have the same {what} ({len(doubled)} such cases): "
            "remove duplicates, name a column that tells them apart by --data.id_key, or let them share their "
            "statistics by --algo.allocation.duplicates merge"
        )


class RaggedPromptSource(PromptSource):
    """The one owner of what sampling remembers: data position, draws, statistics, and samples not yet trained on.

    Attributes:
        statistics: verdicts so far, by prompt.
        calls: how often samples were generated.
        planned: draws of this episode that have a place in one of its training batches.
        waiting: accepted samples by number of their training batch in this episode, in the order of their draws.
    """

    def __init__(self, loader: Any, decay: float) -> None:
        super().__init__(loader)
        self.statistics = PromptStatistics(decay)
        self.calls = 0
        self.planned = 0
        self.waiting: dict[int, list[Experience]] = {}

    def state_dict(self) -> dict[str, Any]:
        own = {
            "prompts": len(self),
            "statistics": self.statistics.state_dict(),
            "calls": self.calls,
            "planned": self.planned,
            "waiting": self.waiting,
        }
        return {**super().state_dict(), "sampling": _packed(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "sampling" not in state:
            raise ValueError(
                "the checkpoint was written without --algo.allocation and the fork's --algo.advantage options, and has "
                "no statistics of prompts: resume with the flags of that run, or begin a new run from its saved model"
            )
        own = _unpacked(state["sampling"])
        if own["prompts"] != len(self):
            raise ValueError(
                f"the checkpoint was written with {own['prompts']} prompts in --data.prompt_dataset, and there are "
                f"{len(self)}: its position means nothing in other data; resume with the data of that run"
            )
        self.statistics.load_state_dict(own["statistics"])
        self.calls, self.planned, self.waiting = own["calls"], own["planned"], own["waiting"]


def _packed(content: Any) -> torch.Tensor:
    """As bytes, uint8: upstream prints the state of a checkpoint when it resumes, and a tensor prints short."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(content: torch.Tensor) -> Any:
    # Written by this class, into a checkpoint that DeepSpeed unpickles as a whole.
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=False)


def training_prompts(upstream: type[PromptDataset], rows: Any, tokenizer: Any, strategy: Any, **kwargs: Any) -> Any:
    """The data set of training prompts: upstream's, or one with identities for ragged sampling."""
    kind = IdentifiedPrompts if is_ragged(strategy.args) else upstream
    return kind(rows, tokenizer, strategy, **kwargs)


def ragged_datasets(
    seeded: Callable[..., tuple[PromptSource, Any, int]], prepare: Callable[..., Any], strategy: Any, tokenizer: Any
) -> tuple[PromptSource, Any, int]:
    """The seeded loaders; for ragged sampling with the source that owns its state, and the steps counted exactly.

    Returns:
        The source of training prompts, the evaluation loader or None, and the number of optimizer steps, of which the
        last batch of an episode takes as many as its samples need.
    """
    source, evaluation, steps = seeded(prepare, strategy, tokenizer)
    args = strategy.args
    if not is_ragged(args):
        return source, evaluation, steps
    settings: Allocation = Allocation.of(args)  # type: ignore[attr-defined]
    whole, left = divmod(len(source), args.rollout.batch_size)
    batches = [args.rollout.batch_size] * whole + [left]
    updates = sum(-(-prompts * args.rollout.n_samples_per_prompt // args.train.batch_size) for prompts in batches)
    steps = updates * int(args.train.num_episodes) * args.train.max_epochs
    return RaggedPromptSource(source.loader, settings.decay), evaluation, steps
