"""The small model, Qwen2's architecture, and its tokenizer of characters."""

import string
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
BOX = "\\boxed{"
"""The one token that is more than a character: every answer begins with it, so answers take half as many tokens."""

CHARACTERS = "\t\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LONGEST = 8192
"""Positions: room for any text of real data, which this model cannot understand but must be able to read."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, one per role, and `BOX`."""
    vocabulary = {token: index for index, token in enumerate([PAD, END, UNKNOWN, *ROLES, BOX, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(BOX, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=ROLES,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=LONGEST,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, tied: bool) -> Qwen2ForCausalLM:
    """A model with random weights, float32; `tied` shares the input embedding with the output layer."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,  # heads of 32, the smallest that vLLM's attention on CPU has
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # for questions of ten characters; learns faster
        initializer_range=0.06,  # likewise, at this width
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=[Qwen2ForCausalLM.__name__],
        dtype=torch.bfloat16,  # of the saved weights
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary Hugging Face folder, weights in bfloat16.

    The files are those of `model.save_pretrained`, which would import DeepSpeed: seconds for nothing.
    """
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def chat_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The prompt that a question becomes by the chat template."""
    message = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
