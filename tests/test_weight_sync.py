"""Weights that reach a vLLM engine on CPU are the ones it generates with."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# In a process of its own: vLLM changes its process for good (threads, NUMA policy, environment).
SCRIPT = r"""
import json, socket, sys, threading
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from openrlhf.device.weight_sync import GlooGroup

folder, tied, size = sys.argv[1], sys.argv[2] == "tied", int(sys.argv[3])
torch.manual_seed(0)
config = Qwen2Config(vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, bos_token_id=None,
                     eos_token_id=1, pad_token_id=0)
Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
torch.manual_seed(1)
new = Qwen2ForCausalLM(config)
# Sharp policies: near-uniform ones hide a stale output matrix.
with torch.no_grad():
    for parameter in new.parameters():
        parameter += torch.randn_like(parameter) * 0.06
new = new.to(torch.bfloat16).eval()
prompts = [[2 + (7 * i + j) % 90 for j in range(3 + i % 9)] for i in range(24)]

llm = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, enforce_eager=True,
          gpu_memory_utilization=0.05, max_logprobs=96, tensor_parallel_size=size,
          distributed_executor_backend="mp" if size > 1 else "uni",
          worker_extension_cls="openrlhf.device.vllm_worker.CpuWorkerWrap")

def log_probs():
    parameters = SamplingParams(temperature=1.0, max_tokens=1, logprobs=96, detokenize=False, seed=5)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    return [{token: entry.logprob for token, entry in out.outputs[0].logprobs[0].items()} for out in outputs]

def wanted(model):
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1) for ids in prompts]

def difference(model):
    pairs = [(row[token].item(), value) for row, got in zip(wanted(model), log_probs()) for token, value in got.items()]
    return sum(abs(a - b) for a, b in pairs if a > -8) / sum(a > -8 for a, _ in pairs)

with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
joined = threading.Thread(target=llm.collective_rpc, args=("init_process_group",),
                          kwargs={"args": ("127.0.0.1", port, 1, size + 1, "weights")})
joined.start()
group = GlooGroup("127.0.0.1", port, 0, size + 1)
joined.join()
old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
result = {"fresh": difference(old), "before": difference(new)}
for round in range(2):
    named = list(new.named_parameters())
    for index, (name, parameter) in enumerate(named, 1):
        arguments = (name, parameter.dtype, parameter.shape, index == len(named))
        receive = threading.Thread(target=llm.collective_rpc, args=("update_weight",), kwargs={"args": arguments})
        receive.start()
        group.broadcast(parameter.data, src=0)
        receive.join()
    result[f"round {round}"] = difference(new)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(0.9)
print("RESULT", json.dumps(result), flush=True)
"""


@pytest.mark.parametrize(("embeddings", "tensor_parallel"), [("untied", 1), ("tied", 1), ("tied", 2)])
def test_an_engine_generates_with_the_weights_it_was_sent(embeddings, tensor_parallel, tmp_path):
    """Mean |Δ log p| against transformers on perturbed weights, over all tokens of some likelihood, two rounds."""
    script = tmp_path / "sync.py"
    script.write_text(f"if __name__ == '__main__':\n{_indented(SCRIPT)}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path / "model"), embeddings, str(tensor_parallel)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    differences = json.loads(lines[0].removeprefix("RESULT "))
    assert differences["before"] > 0.2, "the new weights do not differ enough for the test to see a fault"
    assert differences["fresh"] < 0.01
    assert differences["round 0"] < 0.01
    assert differences["round 1"] < 0.01


def _indented(text):
    return "".join(f"    {line}" for line in text.splitlines(keepends=True))


def _environment():
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "DS_ACCELERATOR": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return {**os.environ, **fixed}
