"""Time and memory of the statistics of tokens against upstream's log-probabilities and entropy, forward and backward.

    python tests/benchmarks/token_stats.py [--peers]

Each way gets the same logits as a model's layer would hand them over (not a leaf), and gives back their gradient for a
weighted sum of log-probabilities. Ours computes all statistics; the others log-probability and entropy, all they have.
Memory is the peak of resident memory above what is there before, the logits among it, as the kernel records it
(VmHWM, reset before each try; Linux). Time is by the clock and, since other processes disturb that, of the processor.
Each is the least of several tries in turns; upstream's is the better one of eager and compiled, in each column.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported

import torch

from openrlhf.models.utils import compute_entropy, log_probs_from_logits
from openrlhf.rlvr.token_stats import Wanted, from_hidden, from_logits

ALL = Wanted(entropy=True, mode=True, square_term=True)
COLUMNS = ("seconds", "processor seconds", "MB")
Way = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Log-probabilities and entropies from logits and tokens."""


@dataclass
class Figures:
    """The least of each column so far."""

    least: list[float] = field(default_factory=lambda: [float("inf")] * len(COLUMNS))

    def better(self, measured: list[float]) -> None:
        self.least = list(map(min, self.least, measured))


def measured(work: Callable[[], Any], aside: int = 0) -> tuple[list[float], Any]:
    """Seconds, processor seconds and megabytes above the present ones (less ``aside`` bytes), and the result."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before, clock, processor = resident("VmRSS"), time.perf_counter(), time.process_time()
    result = work()
    seconds = [time.perf_counter() - clock, time.process_time() - processor]
    return [*seconds, (resident("VmHWM") - before - aside) / 1e6], result


def resident(which: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(which))


def ours(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stats = from_logits(logits, tokens, wanted=ALL)
    return stats.log_probs, stats.entropy


def ours_in_place(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stats = from_logits(logits, tokens, wanted=ALL, overwrite=True)
    return stats.log_probs, stats.entropy


def upstream_eager(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    entropy = compute_entropy._torchdynamo_orig_callable(logits)
    return log_probs_from_logits(logits, tokens), entropy


def upstream_compiled(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    entropy = compute_entropy(logits)
    return log_probs_from_logits(logits, tokens), entropy


def compiles() -> bool:
    try:
        compute_entropy(torch.zeros(2, 8))
    except Exception as error:  # a missing compiler raises what torch wraps it in
        print(f"upstream compiled: skipped, torch.compile does not work here ({type(error).__name__})")
        return False
    return True


def peers() -> dict[str, Way]:
    """Those that are installed, each with what its own trainer calls."""
    ways: dict[str, Way] = {}
    for name, module, log_probs, entropy in (
        ("verl", "verl.utils.torch_functional", "logprobs_from_logits", "entropy_from_logits"),
        ("verl, chunked", "verl.utils.torch_functional", "logprobs_from_logits", "entropy_from_logits_with_chunking"),
        ("TRL", "trl.trainer.utils", "selective_log_softmax", "entropy_from_logits"),
    ):
        try:
            functions = import_module(module)
            pair = getattr(functions, log_probs), getattr(functions, entropy)
        except (ImportError, AttributeError) as error:
            print(f"{name}: skipped ({error})")
            continue
        ways[name] = lambda logits, tokens, pair=pair: (pair[0](logits, tokens), pair[1](logits))
    return ways


def compare_logits(args: argparse.Namespace, tokens: torch.Tensor, weights: torch.Tensor) -> dict[str, Figures]:
    ways: dict[str, Way] = {"upstream eager": upstream_eager}
    if compiles():
        ways["upstream compiled"] = upstream_compiled
    ways |= {"ours": ours, "ours, in place": ours_in_place, **(peers() if args.peers else {})}
    base = torch.randn(args.tokens, args.vocabulary).mul_(2).requires_grad_()
    figures = {name: Figures() for name in ways}
    reference = None
    for _ in range(args.repeats):
        for name, way in ways.items():
            logits = base.clone()

            def work(way: Way = way, logits: torch.Tensor = logits) -> tuple[torch.Tensor, ...]:
                log_probs, entropy = way(logits, tokens)
                (gradient,) = torch.autograd.grad((log_probs * weights).sum(), logits)
                return log_probs.detach(), entropy.detach(), gradient[::64].clone()

            figure, result = measured(work)
            figures[name].better(figure)
            reference = reference or result
            for one, other in zip(result, reference, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return figures


def compare_hidden(args: argparse.Namespace, tokens: torch.Tensor, weights: torch.Tensor) -> dict[str, Figures]:
    hidden = torch.randn(args.tokens, args.hidden_size).requires_grad_()
    matrix = torch.randn(args.vocabulary, args.hidden_size).mul_(2 / args.hidden_size**0.5).requires_grad_()
    figures = {"ours, from hidden states": Figures()}

    def work() -> None:
        stats = from_hidden(hidden, matrix, tokens, wanted=ALL)
        torch.autograd.grad((stats.log_probs * weights).sum(), (hidden, matrix))

    for _ in range(max(1, args.repeats - 1)):
        figure, _ = measured(work, aside=matrix.nbytes)
        figures["ours, from hidden states"].better(figure)
    return figures


def report(figures: dict[str, Figures], upstream: list[float]) -> None:
    for name, figure in figures.items():
        values = "  ".join(
            f"{value:9.3f} ({value / best:5.3f})" for value, best in zip(figure.least, upstream, strict=True)
        )
        print(f"{name:26}{values}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden-size", type=int, default=896)
    parser.add_argument("--repeats", type=int, default=4, help="tries, the first of which compiles")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", action="store_true", help="also verl's and TRL's functions, where installed")
    parser.add_argument("--without-hidden", action="store_true", help="leave out the form without logits")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokens, weights = torch.randint(args.vocabulary, (args.tokens,)), torch.randn(args.tokens)
    print(
        f"{args.tokens} tokens x {args.vocabulary} logits, float32, {args.threads} threads, load {os.getloadavg()[0]}"
    )
    print(f"{'(share of upstream best)':26}" + "  ".join(f"{column:>17}" for column in COLUMNS))
    figures = compare_logits(args, tokens, weights)
    upstream = [min(pair) for pair in zip(*(f.least for name, f in figures.items() if "upstream" in name), strict=True)]
    report(figures, upstream)
    if not args.without_hidden:
        report(compare_hidden(args, tokens, weights), upstream)
    print(f"load {os.getloadavg()[0]}")


if __name__ == "__main__":
    main()
