"""The samples of a prompt share its prefill in a real engine, and what they say does not depend on that."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# In a process of its own: vLLM changes its process for good (threads, NUMA policy, environment).
SCRIPT = r"""
import json, sys
from vllm import LLM, SamplingParams
from openrlhf.device import engine_options
from openrlhf.repeat.seeds import derive, for_sample

llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, enforce_eager=True,
          gpu_memory_utilization=0.05, enable_prefix_caching=sys.argv[2] == "cached", **engine_options())
block = llm.llm_engine.vllm_config.cache_config.block_size
prompts = [[5 + (7 * draw + place) % 90 for place in range(2 * block + 11 * (draw + 1))] for draw in range(3)]
requests, parameters = [], []
for draw, prompt in enumerate(prompts):
    shared = SamplingParams(temperature=1.0, max_tokens=8, detokenize=False, seed=derive(1, draw))
    for number in range(5 - draw):
        requests.append({"prompt_token_ids": prompt})
        parameters.append(for_sample(shared, number))
outputs = llm.generate(requests, parameters, use_tqdm=False)
print(json.dumps({
    "block": block,
    "draws": [5, 4, 3],
    "lengths": [len(prompt) for prompt in prompts],
    "cached": [output.num_cached_tokens or 0 for output in outputs],
    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
}))
"""


def engine(task, mode):
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-c", SCRIPT, str(task / "model"), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_one_prefill_serves_all_samples_of_a_prompt_and_changes_none(task):
    cached, plain = engine(task, "cached"), engine(task, "plain")
    assert plain["cached"] == [0] * 12
    assert cached["tokens"] == plain["tokens"]
    assert len(set(map(tuple, cached["tokens"][:5]))) > 1, "samples of a prompt differ"
    first = 0
    for samples, length in zip(cached["draws"], cached["lengths"], strict=True):
        alone, *others = cached["cached"][first : first + samples]
        assert alone == 0
        assert all(tokens == (length - 1) // cached["block"] * cached["block"] for tokens in others)
        first += samples
