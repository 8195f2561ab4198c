"""Statistics of tokens from an actor's forward pass, in place of upstream's log-probabilities and entropy.

They are made of the logits, or inside the output layer, which then never holds the logits of all tokens: its forward
is replaced while the model runs. There ZeRO-3 has gathered its matrix, and gathers it again for the backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from openrlhf.rlvr.entropy import mean_entropy
from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.token_stats import TokenStats, from_hidden, from_logits
from openrlhf.rlvr.token_sums import Wanted
from openrlhf.utils.vlm_utils import merge_mm_train_inputs

PLAIN_OUTPUT = (
    *("llama", "mistral", "mixtral", "olmo2", "phi3", "smollm3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
"""Model types whose logits are what the output layer gives: no scaling, no cap, nothing after it."""

FIELDS = tuple(item.name for item in fields(TokenStats))


@settings("actor")
class TokenStatistics:
    """Where log-probabilities and the other statistics of tokens come from."""

    token_stats: str | None = flag(
        None,
        "log-probabilities and entropy in one pass, from the logits or from hidden states, which never holds all "
        "logits and computes them twice; auto: from hidden states where the model allows it, else from logits. "
        "Default: auto in runs with a method that upstream does not have, else upstream's own passes",
        choices=("auto", "logits", "hidden"),
    )

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if self.token_stats != "hidden":
            return []
        return [
            f"--actor.token_stats hidden: not with --{name}, which splits or replaces the output layer; give logits"
            for name, excluded in _splitting(flags)
            if excluded
        ]


def _splitting(flags: dict[str, Any]) -> list[tuple[str, bool]]:
    return [
        ("ds.tensor_parallel_size above 1", flags["ds.tensor_parallel_size"] > 1),
        ("ds.ring_attn_size above 1", flags["ds.ring_attn_size"] > 1),
        ("ds.use_liger_kernel", flags["ds.use_liger_kernel"]),
    ]


@dataclass(frozen=True)
class Statistics:
    """What an actor computes of its tokens.

    Args:
        hidden: from hidden states and the output matrix instead of logits.
        learning: statistics in training mode.
        sampling: statistics of the policy that sampled, in evaluation mode.
    """

    hidden: bool
    learning: Wanted
    sampling: Wanted

    @classmethod
    def of(cls, args: Any, model: Any, learning: Wanted, sampling: Wanted) -> "Statistics":
        """As the run's flags have it for this model.

        Raises:
            ValueError: hidden states are asked for, and the model does something else with its logits.
        """
        chosen = args.actor.token_stats
        if chosen == "hidden" and not has_plain_output(model):
            raise ValueError(
                f"--actor.token_stats hidden: it is not known of {type(_inside(model)).__name__} that its output "
                f"layer gives the logits as they are (known: {', '.join(PLAIN_OUTPUT)}); give logits"
            )
        split = any(splits for _, splits in _splitting({f"ds.{name}": value for name, value in vars(args.ds).items()}))
        return cls(chosen != "logits" and not split and has_plain_output(model), learning, sampling)


def has_plain_output(model: Any) -> bool:
    """Whether a model's logits are its output layer's, and that layer an ordinary one."""
    model_type = getattr(getattr(_inside(model), "config", None), "model_type", None)
    return model_type in PLAIN_OUTPUT and type(_output_layer(model)) is torch.nn.Linear


def _inside(model: Any) -> Any:
    """The Hugging Face model in DeepSpeed's engine, or the model itself."""
    return getattr(model, "module", model)


def _output_layer(model: Any) -> Any:
    return _inside(model).get_output_embeddings()


def model_output(
    actor: Any, tokens: torch.Tensor, action_mask: torch.Tensor | None, present: torch.Tensor, /, *args: Any, **kw: Any
) -> Any:
    """What an actor's model gives, with ``statistics`` of the tokens in place of logits where a run asks for them.

    Args:
        actor: upstream's actor; one without ``token_statistics`` gives its logits.
        tokens: the token that follows each position, shape (B, T), or packed (1, N).
        action_mask: of responses, shape (B, A); only positions that predict them are computed.
        present: upstream's attention mask, shape (B, T): of (B, T), packed positions are those where it is set.
        args, kw: of the model.
    """
    chosen: Statistics | None = getattr(actor, "token_statistics", None)
    if chosen is None or action_mask is None:
        return actor.model(*args, **kw)
    options: dict[str, Any] = {
        "wanted": chosen.learning if actor.training else chosen.sampling,
        "temperature": actor.temperature,
        "mask": _predicting(tokens, action_mask, present),
    }
    if chosen.hidden:
        layer = _output_layer(actor.model)

        def in_layer(hidden: torch.Tensor) -> torch.Tensor:
            return _stacked(from_hidden(hidden, layer.weight, tokens, bias=layer.bias, **options))

        with _forward_of(layer, in_layer):
            output = actor.model(*args, **kw)
        output.statistics = _unstacked(output["logits"], options["wanted"])
        output.vocabulary = layer.out_features
    else:
        output = actor.model(*args, **kw)
        logits = output["logits"]
        output.vocabulary = logits.shape[-1]
        output.statistics = from_logits(logits, tokens, overwrite=logits.requires_grad, **options)
    # Upstream rounds and scales what stands here; nobody reads it any more.
    output["logits"] = output.statistics.log_probs.new_empty(0)
    return output


@contextmanager
def _forward_of(layer: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace what a module computes, and leave its hooks."""
    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before


def _predicting(tokens: torch.Tensor, action_mask: torch.Tensor, present: torch.Tensor) -> torch.Tensor | None:
    """Positions whose next token is one of a response, shape of ``tokens``; None (all) where ranks share a sequence."""
    mask = torch.zeros(present.shape, dtype=torch.bool, device=tokens.device)
    mask[:, -action_mask.shape[1] - 1 : -1] = action_mask.bool()
    if mask.shape != tokens.shape:
        mask = mask[present.bool()][None]
    return mask if mask.shape == tokens.shape else None


def _stacked(stats: TokenStats) -> torch.Tensor:
    """Those statistics that there are, as one tensor of floats, shape (B, T, number): ZeRO-3 watches tensors only."""
    values = [getattr(stats, name) for name in FIELDS]
    return torch.stack([value.to(stats.log_probs.dtype) for value in values if value is not None], -1)


def _unstacked(stacked: torch.Tensor, wanted: Wanted) -> TokenStats:
    there = (True, wanted.entropy, wanted.mode, wanted.mode, wanted.square_term)
    values = iter(stacked.unbind(-1))
    found: dict[str, Any] = {name: next(values) if has else None for name, has in zip(FIELDS, there, strict=True)}
    for name, has in (("entropy", wanted.entropy_gradient), ("mode_log_prob", wanted.mode_gradient)):
        if found[name] is not None and not has:
            found[name] = found[name].detach()
    if wanted.square_term:
        found["square_term"] = found["square_term"].detach()
    if wanted.mode:
        found["is_mode"] = found["is_mode"].detach() > 0.5
    return TokenStats(**found)


def log_probs_of(output: Any, tokens: torch.Tensor, upstream: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Log-probabilities of tokens, shape of ``tokens``: of the statistics, or by upstream's function from logits."""
    stats: TokenStats | None = getattr(output, "statistics", None)
    return stats.log_probs if stats else upstream(output["logits"], tokens)


def entropy_of(output: Any, upstream: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Entropy of each position, for the entropy loss; of the statistics, or by upstream's function from logits."""
    stats: TokenStats | None = getattr(output, "statistics", None)
    return upstream(output["logits"]) if stats is None or stats.entropy is None else stats.entropy


def padded(gather: Callable[..., torch.Tensor], output: Any, log_probs: torch.Tensor, *layout: Any) -> torch.Tensor:
    """Packed log-probabilities back in rows, and the other statistics with them."""
    if stats := getattr(output, "statistics", None):
        values = {
            name: gather(value, *layout) for name, value in vars(stats).items() if isinstance(value, torch.Tensor)
        }
        output.statistics = replace(stats, **values)
        return values["log_probs"]
    return gather(log_probs, *layout)


def responses(trainer: Any, experience: Any, **options: Any) -> Any:
    """What an actor gives for the responses of a micro-batch, as in upstream's own update; ``options``: more of its."""
    device = trainer.actor.model.device
    experience.to_device(device)
    images = experience.mm_train_inputs if getattr(trainer.actor, "is_vlm", False) else None
    return trainer.actor(
        experience.sequences,
        experience.action_mask,
        attention_mask=experience.attention_mask,
        ring_attn_group=trainer.strategy.ring_attn_group,
        **options,
        **(merge_mm_train_inputs(images, device) if images else {}),
    )


def sampled_policy(actor: Any, *args: Any, **kw: Any) -> torch.Tensor:
    """Log-probabilities under the policy that sampled, (B, A); and its entropies, (2, B, A), where they are wanted."""
    chosen: Statistics | None = getattr(actor, "token_statistics", None)
    if chosen is None or not chosen.sampling.entropy:
        log_probs: torch.Tensor = actor(*args, **kw)
        return log_probs
    log_probs, output = actor(*args, return_output=True, **kw)
    entropy = output.statistics.entropy[:, :-1][:, -log_probs.shape[1] :]
    return torch.stack([log_probs, entropy])


def log_probs_and_entropy(experiences: list[Any], found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probabilities (B, A) of what ``sampled_policy`` gave; experiences get the mean entropy of each response."""
    for one, values in zip(experiences, found, strict=True):
        if values.dim() == 3:
            one.info["entropy"] = mean_entropy(values[1], one.action_mask)
    return [values[0] if values.dim() == 3 else values for values in found]
