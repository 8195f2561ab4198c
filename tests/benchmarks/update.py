"""What the methods cost: updates of upstream's actor by plain GRPO and with everything on, with a large vocabulary.

    PYTHONPATH=.:tests python tests/benchmarks/update.py

One process, a small model, random samples; plain GRPO is upstream's own loss and passes. Tries go in turns, and shares
are those of one turn, since other processes disturb times. Run it on a quiet machine.
"""

import argparse
import contextlib
import io
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median

import ray
import torch
from recorded_updates import learn, prepared
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.rlvr.samples import Group, Sample, checksum
from openrlhf.trainer.ppo_utils.experience import Experience
from slurm import ROOT

PLAIN, OURS = "plain GRPO", "plain GRPO, our statistics"

EVERYTHING = [
    *("actor.policy_loss_type=acpo", "algo.modulation.enable=true", "actor.fork_tokens.enable=true"),
    *("algo.gtpo.enable=true", "algo.gtpo.max_entropy=1e9", "algo.entropy_advantage.enable=true"),
    *("algo.advantage.is_correction_level=token", "algo.advantage.is_correction_mode=clip", "logger.policy=true"),
]
"""Methods that combine, all of them; and the metrics of the policy."""


def model(folder: Path, vocabulary: int, hidden: int, layers: int) -> None:
    """A model of random weights with tied embeddings, beside the tiny task's tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for path in (ROOT / "build/tiny/model").iterdir():
        if not (folder / path.name).exists():
            shutil.copy(path, folder)


def samples(count: int, length: int, vocabulary: int) -> list[Experience]:
    """Random samples in groups of eight, of which every third is right."""
    made = []
    for place in range(count):
        group = Group(place // 8, f"prompt {place // 8}", "", "", 0, 8, None, 0.0, 0.0)
        tokens = torch.randint(3, vocabulary, (1, 8 + length))
        mask = torch.ones(1, 7 + length)
        mask[:, :7] = 0
        reward = torch.tensor([float(place % 3 == 0)])
        made.append(
            Experience(
                sequences=tokens,
                attention_mask=torch.ones_like(tokens),
                action_mask=mask,
                rollout_log_probs=mask * -11.9,
                rewards=reward,
                response_length=torch.tensor([length]),
                truncated=torch.tensor([False]),
                total_length=torch.tensor([8.0 + length]),
                info={"reward": reward.clone()},
                samples=[Sample(group, place % 8, checksum(tokens), place % 3 == 0)],
            )
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rollout, folder = samples(args.samples, args.tokens, args.vocabulary), Path(tempfile.mkdtemp())
    model(folder, args.vocabulary, args.hidden_size, args.layers)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    common = [
        *(f"actor.model_name_or_path={folder}", f"train.batch_size={args.samples}", "ds.param_dtype=bf16"),
        *(f"rollout.batch_size={args.samples // 8}", f"rollout.micro_batch_size={args.samples}"),
    ]
    one, four = (f"train.micro_batch_size={args.samples // parts}" for parts in (1, 4))
    ways = {
        PLAIN: [one],
        OURS: [one, "actor.token_stats=logits"],
        "everything": [one, "actor.token_stats=logits", *EVERYTHING, "algo.modulation.scope=microbatch"],
        "everything, from hidden states": [one, *EVERYTHING, "actor.token_stats=hidden"],
        f"{PLAIN}, 4": [four],
        f"{OURS}, 4": [four, "actor.token_stats=logits"],
        "modulation by micro-batch, 4": [
            four,
            "actor.token_stats=logits",
            "algo.modulation.enable=true",
            "algo.modulation.scope=microbatch",
        ],
        "everything by the step, 4": [four, "actor.token_stats=logits", *EVERYTHING],
    }
    grpo = str(ROOT / "configs/recipes/tiny_grpo.yaml")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    print(f"{args.samples} x {args.tokens} tokens, {args.vocabulary} of vocabulary, load {os.getloadavg()[0]}")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            actors = {name: prepared(grpo, common + overrides) for name, overrides in ways.items()}
            for _ in range(args.repeats):
                for name, parts in actors.items():
                    seconds[name].append(learn(*parts, rollout)[1])
    finally:
        shutil.rmtree(folder)
    print(f"{'':32} least seconds, share of plain GRPO, of plain GRPO with our statistics (medians of the turns)")
    for name, tries in seconds.items():
        mark = ", 4" if name.endswith("4") else ""
        bases = [seconds[base + mark] for base in (PLAIN, OURS)]
        shares = [median(own / other for own, other in zip(tries, base, strict=True)) for base in bases]
        print(f"{name:32} {min(tries):7.3f} {shares[0]:7.3f} {shares[1]:7.3f}", flush=True)
    print(f"load {os.getloadavg()[0]}")


if __name__ == "__main__":
    main()
