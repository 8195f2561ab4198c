"""Statistics of tokens in an actor's forward pass: both forms are upstream's numbers, for every model type known."""

from types import SimpleNamespace

import pytest
import torch
from arguments import arguments
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from openrlhf.models import Actor
from openrlhf.rlvr.statistics import PLAIN_OUTPUT, Statistics, TokenStatistics, has_plain_output, model_output
from openrlhf.rlvr.token_sums import Wanted

VOCABULARY, TEMPERATURE = 50, 0.7
ALL = Wanted(entropy=True, mode=True, square_term=True, entropy_gradient=True)
SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24},
    **{"shared_expert_intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
    **{"num_key_value_heads": 1, "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64},
}


def actor(model_type: str, statistics: Statistics | None, **own) -> Actor:
    """Upstream's actor around a small model of a type, as it is after DeepSpeed took it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL, **own)
    made = Actor(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    made.temperature, made.packing_samples = TEMPERATURE, False
    if statistics:
        made.token_statistics = statistics
    return made.train()


def batch(seed: int = 1):
    """Two sequences, padded on both sides, with responses of three and four tokens."""
    torch.manual_seed(seed)
    present = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]]).float()
    return torch.randint(3, VOCABULARY, present.shape) * present, mask, present


def learnt(one: Actor):
    """Log-probabilities and entropies of responses, the gradients of a loss of both, and the output."""
    tokens, mask, present = batch()
    with torch.compiler.set_stance("force_eager"):  # upstream compiles its entropy
        log_probs, output = one(tokens, mask, attention_mask=present, return_output=True, return_entropy=True)
    entropy = output.entropy * mask
    (log_probs.sin() + 0.3 * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), [p.grad for p in one.parameters()], output


@pytest.mark.parametrize("model_type", PLAIN_OUTPUT)
def test_both_forms_are_upstreams_numbers_and_gradients(model_type):
    expected = learnt(actor(model_type, None))
    assert has_plain_output(actor(model_type, None).model)
    for hidden in (False, True):
        one = actor(model_type, Statistics(hidden, ALL, Wanted()))
        shapes = []
        one.model.get_output_embeddings().register_forward_hook(lambda _, __, out: shapes.append(out.shape[-1]))  # noqa: B023
        found = learnt(one)
        assert shapes == [5 if hidden else VOCABULARY]
        assert found[3].vocabulary == VOCABULARY and found[3]["logits"].numel() == 0
        for mine, theirs in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(mine, theirs)
        for mine, theirs in zip(found[2], expected[2], strict=True):
            if theirs is None or mine is None:
                assert mine is theirs
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("hidden", [False, True])
def test_what_is_wanted_depends_on_the_mode_and_the_layer_is_left_as_it_was(hidden):
    one = actor("qwen2", Statistics(hidden, Wanted(mode=True), Wanted(entropy=True)))
    tokens, mask, present = batch()
    layer = one.model.get_output_embeddings()
    for training in (True, False):
        one.train(training)
        with torch.no_grad():
            _, output = one(tokens, mask, attention_mask=present, return_output=True)
        stats = output.statistics
        assert (stats.mode_log_prob is None, stats.entropy is None) == (not training, training)
    assert "forward" not in vars(layer)
    assert one.model(tokens).logits.shape == (*tokens.shape, VOCABULARY)
    assert one(tokens, attention_mask=present, return_output=True)["logits"].shape == (*tokens.shape, VOCABULARY)


def test_models_that_change_their_logits_are_not_read_inside_the_output_layer():
    capped = actor("gemma2", None).model
    assert not has_plain_output(capped)
    args = arguments(actor__token_stats="hidden")
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM.*qwen2.*logits"):
        Statistics.of(args, capped, ALL, Wanted())
    plain = actor("qwen2", None).model
    plain.lm_head = torch.nn.Sequential(plain.lm_head)
    assert not has_plain_output(plain)


def test_without_a_choice_the_output_layer_is_read_where_that_can_be():
    plain, capped = actor("qwen2", None).model, actor("gemma2", None).model
    for chosen, hidden in ((None, True), ("auto", True), ("logits", False), ("hidden", True)):
        assert Statistics.of(arguments(actor__token_stats=chosen), plain, ALL, Wanted()).hidden is hidden
    for flags in ({}, {"ds__tensor_parallel_size": 2}, {"ds__ring_attn_size": 2}, {"ds__use_liger_kernel": True}):
        model = plain if flags else capped
        assert not Statistics.of(arguments(actor__token_stats="auto", **flags), model, ALL, Wanted()).hidden


@pytest.mark.parametrize(
    "flags", [{"ds.tensor_parallel_size": 2}, {"ds.ring_attn_size": 2}, {"ds.use_liger_kernel": True}]
)
def test_an_output_layer_that_is_split_or_replaced_is_refused_by_name(flags):
    given = {"ds.tensor_parallel_size": 1, "ds.ring_attn_size": 1, "ds.use_liger_kernel": False} | flags
    (problem,) = TokenStatistics(token_stats="hidden").problems(given)
    assert "--actor.token_stats hidden" in problem and next(iter(flags)) in problem
    assert TokenStatistics(token_stats="auto").problems(given) == []


def test_bfloat16_logits_are_read_as_they_are():
    tokens, mask, present = batch()
    logits = torch.randn(2, 8, VOCABULARY).bfloat16().requires_grad_()
    fake = SimpleNamespace(
        token_statistics=Statistics(False, ALL, Wanted()),
        training=True,
        temperature=TEMPERATURE,
        model=lambda: CausalLMOutput(logits=logits * 1),
    )
    output = model_output(fake, tokens.roll(-1, 1), mask, present)
    expected = (logits.float() / TEMPERATURE).log_softmax(-1).gather(-1, tokens.roll(-1, 1)[..., None])[..., 0]
    torch.testing.assert_close(output.statistics.log_probs[:, :-1] * mask, expected[:, :-1] * mask)
