"""Accuracy of a model on prompts, by transformers alone: independent of vLLM and of the reward that trained it.

python -m openrlhf.rlvr.tiny_task.accuracy --model DIR --data FILE.jsonl [--temperature 1] [--samples 4]
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from openrlhf.rlvr.rewards.math import grade
from openrlhf.rlvr.tiny_task.model import chat_prompt

LONGEST_ANSWER = 12
"""Tokens; right answers of the tiny task have at most 5."""


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    temperature: float = 1.0,
    samples: int = 1,
) -> dict[str, float]:
    """Share of right answers by `datasource`, and over all rows under `all`; temperature 0 is greedy."""
    prompts = [chat_prompt(tokenizer, row["input"]) for row in rows for _ in range(samples)]
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=LONGEST_ANSWER,
            **sampling,
        )
    responses = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :])
    by_source: dict[str, list[bool]] = {"all": []}
    for row, response in zip([row for row in rows for _ in range(samples)], responses, strict=True):
        right = grade(row["label"], response).correct
        by_source["all"].append(right)
        by_source.setdefault(row["datasource"], []).append(right)
    return {source: round(sum(right) / len(right), 4) for source, right in sorted(by_source.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of a model, in total and by datasource.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="rows with input, label and datasource")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--samples", type=int, default=4, help="answers to each prompt")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.data.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    torch.manual_seed(0)
    print(json.dumps(accuracy(model, tokenizer, rows, arguments.temperature, arguments.samples)))


if __name__ == "__main__":
    main()
