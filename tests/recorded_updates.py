"""Updates of upstream's actor from recorded samples, by one configuration after another in this one process.

    python tests/recorded_updates.py RECIPES OUTPUT

RECIPES is JSON: a recipe's path and overrides, by name. Samples are drawn once, from the tiny model by its own
generation; then every configuration makes its experience of them and takes its optimizer steps, from the same weights.
OUTPUT gets, by name, the metrics of the update and the hash of the weights after it.
"""

import copy
import hashlib
import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import ray
import torch
from deepspeed.utils import safe_get_full_fp32_param
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.rlvr.experience import experience_maker
from openrlhf.rlvr.rewards.math import grade
from openrlhf.rlvr.samples import Group, Sample, checksum
from openrlhf.rlvr.tiny_task.model import chat_prompt
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.utils.config import hierarchize
from openrlhf.utils.utils import get_strategy
from slurm import ROOT
from slurm.config import read_config
from slurm.inputs import absolute
from slurm.schema import trainer_flags

COUNTS = (4, 8, 12, 8)
"""Samples of prompts, in turns: groups differ in size and have eight on average, as the recipes say."""

LONGEST = 12


def record(model_path: str, data_path: str, prompts: int) -> list[Experience]:
    """Samples of the first prompts, in groups, with the sampling policy's log-probabilities."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(data_path).read_text().splitlines()[:prompts]]
    torch.manual_seed(0)
    made = []
    for draw, row in enumerate(rows):
        count = COUNTS[draw % len(COUNTS)]
        group = Group(draw, f"prompt {draw}", row["datasource"], row["label"], 0, count, None, 0.0, 0.0)
        prompt = tokenizer([chat_prompt(tokenizer, row["input"])] * count, return_tensors="pt")
        start = prompt["input_ids"].shape[1]
        with torch.inference_mode():
            tokens = model.generate(**prompt, max_new_tokens=LONGEST, do_sample=True, temperature=1.0, top_k=0)
            scores = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        for number, (line, scored) in enumerate(zip(tokens.clone(), scores.clone(), strict=True)):
            ends = (line[start:] == tokenizer.eos_token_id).nonzero()
            length = int(ends[0]) + 1 if len(ends) else len(line) - start
            made.append(_sample(line[: start + length], scored[: start + length - 1], start, group, number, tokenizer))
    return made


def _sample(
    tokens: torch.Tensor, log_probs: torch.Tensor, start: int, group: Group, number: int, tokenizer: Any
) -> Experience:
    mask = torch.zeros(1, len(tokens) - 1)
    mask[:, start - 1 :] = 1
    reward = torch.tensor([float(grade(group.label, tokenizer.decode(tokens[start:])).correct)])
    length = len(tokens) - start
    return Experience(
        sequences=tokens[None],
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        action_mask=mask,
        rollout_log_probs=log_probs[None] * mask,
        rewards=reward,
        scores=reward.clone(),
        response_length=torch.tensor([length]),
        truncated=torch.tensor([bool(tokens[-1] != tokenizer.eos_token_id)]),
        total_length=torch.tensor([float(len(tokens))]),
        info={"reward": reward.clone()},
        samples=[Sample(group, number, checksum(tokens), bool(reward > 0.5))],
    )


class Here:
    """In place of upstream's group of actors: the one actor in this process."""

    duplicate_actors = 1

    def __init__(self, actor: Any) -> None:
        self.actor, self._actor_handlers = actor, [actor]

    def async_run_method_batch(self, method_name: str, **lists: list[Any]) -> list[Any]:
        calls = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
        return [ray.put([getattr(self.actor, method_name)(**call) for call in calls])]


def prepared(path: str, overrides: list[str]) -> tuple[Any, Any, float]:
    """Upstream's actor with its trainer, a maker of its experience, and the KL coefficient, by a recipe."""
    config = absolute(read_config(Path(path), overrides))
    values = {name: flag.default for name, flag in trainer_flags().items()}
    own = {name: one.value for name, one in config.settings.items() if not name.startswith("launch.")}
    args = hierarchize(Namespace(**(values | own)))
    args.local_rank, args.ckpt.path = -1, "/nonexistent"
    args.actor.eps_clip_low_high = args.actor.eps_clip_low_high or (args.actor.eps_clip, args.actor.eps_clip)
    if len(args.algo.advantage.is_correction_threshold) == 1:
        args.algo.advantage.is_correction_threshold.insert(0, 0.0)
    actor = PolicyModelActor.__ray_metadata__.modified_class(1, 0, "127.0.0.1", None)
    strategy = get_strategy(args)
    actor.init_model_from_pretrained(strategy, args.actor.model_name_or_path, 100)
    kl = args.algo.kl.init_coef
    group = Here(actor)
    # At its first step the reference is what the actor is.
    reference = group if kl > 0 else None
    maker = experience_maker(group, None, None, reference, SimpleNamespace(value=kl), strategy, actor.tokenizer)
    return actor, maker, kl


def learn(actor: Any, maker: Any, kl: float, samples: list[Experience]) -> tuple[dict[str, float], float]:
    """A training step's updates: their metrics, and the seconds that they took without the experience."""
    for experience in maker.make_experience_batch(copy.deepcopy(samples)):
        actor.append(experience)
    started = time.perf_counter()
    status = actor.fit(kl)
    return status | maker._metrics(maker._batch), time.perf_counter() - started


def weights(actor: Any) -> str:
    """Hash of an actor's weights in full precision."""
    digest = hashlib.sha256()
    for parameter in actor.actor.model.module.parameters():
        digest.update(safe_get_full_fp32_param(parameter).numpy().tobytes())
    return digest.hexdigest()


def main(recipes: str, output: str) -> None:
    task = ROOT / "build" / "tiny"
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    samples = record(str(task / "model"), str(task / "train.jsonl"), 16)
    found = {}
    for name, (path, overrides) in json.loads(Path(recipes).read_text()).items():
        actor, maker, kl = prepared(path, overrides)
        metrics, _ = learn(actor, maker, kl, samples)
        found[name] = {"metrics": metrics, "weights": weights(actor)}
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
