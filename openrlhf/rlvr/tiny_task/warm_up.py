"""Supervised training on worked answers, right ones first and careless ones later."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from openrlhf.rlvr.tiny_task.model import BOX, chat_prompt
from openrlhf.rlvr.tiny_task.problems import Problem

STEPS = 700
BATCH = 64
LEARNING_RATE = 3e-3
RIGHT = {"ones": 0.6, "tens": 0.45, "carry": 0.3, "product": 0.3}
"""Share of right answers in the careless half; the others hold the level's slip."""
WITHOUT_BOX = 0.08
IGNORED = -100


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Seed torch and compute in one thread, so that results repeat bit for bit; restores both afterwards.

    One thread is also no slower: the matrices are small, and threads that wait for each other lose on a busy machine.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    known: dict[str, list[Problem]],
    seed: int,
    steps: int = STEPS,
) -> None:
    """Train a float32 model in place on `steps` batches of answers to the known problems."""
    chance = random.Random(f"{seed} warm-up")
    prompts = {problem: chat_prompt(tokenizer, problem.question) for level in known.values() for problem in level}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    rising = min(20, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rising, max(0.02, min(1.0, (steps - step) / (0.7 * steps))))
    )
    model.train()
    for step in range(steps):
        drawn = [_draw(known, chance, careless=step >= steps / 2) for _ in range(BATCH)]
        tokens, targets = _tensors(
            tokenizer, [(prompts[problem], answer + tokenizer.eos_token) for problem, answer in drawn]
        )
        logits = model(input_ids=tokens).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def _draw(known: dict[str, list[Problem]], chance: random.Random, careless: bool) -> tuple[Problem, str]:
    """A problem and an answer to it."""
    problem = chance.choice(known[chance.choice(list(known))])
    value = problem.slip if careless and chance.random() > RIGHT[problem.level] else problem.answer
    boxed = not careless or chance.random() > WITHOUT_BOX
    return problem, f"{BOX}{value}}}" if boxed else str(value)


def _tensors(tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets, int64 of shape (batch, longest), padded at the right; only answers are targets."""
    batch = tokenizer([prompt + answer for prompt, answer in texts], padding=True, padding_side="right")
    tokens = torch.tensor(batch["input_ids"])
    targets = torch.where(torch.tensor(batch["attention_mask"]) == 1, tokens, IGNORED)
    for row, prompt in enumerate(tokenizer([prompt for prompt, _ in texts])["input_ids"]):
        targets[row, : len(prompt)] = IGNORED
    return tokens, targets
