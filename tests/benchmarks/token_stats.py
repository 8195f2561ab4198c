"""Time and memory of the statistics of tokens against upstream's log-probabilities and entropy, forward and backward.

    python tests/benchmarks/token_stats.py [--peers]

Each way gets the same logits as a model's layer would hand them over (not a leaf), and gives back their gradient for a
weighted sum of log-probabilities. Ours computes all statistics; the others log-probability and entropy, all they have.
Memory is the peak of resident memory above what is there before, the logits among it, as the kernel records it
(VmHWM, reset before each try; Linux). Time is by the clock and, since other processes disturb that, of the processor.
Of several tries in turns the least time and the median memory count, of upstream eager and compiled the better one in
each column.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from ctypes import CDLL
from importlib import import_module
from statistics import median
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on a busy machine threads that wait spinning slow down all

import torch

from openrlhf.models.utils import compute_entropy, log_probs_from_logits
from openrlhf.rlvr.token_stats import Wanted, from_hidden, from_logits

ALL = Wanted(entropy=True, mode=True, square_term=True)
COLUMNS = ("seconds", "processor seconds", "MB")

Way = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Log-probabilities and entropies from logits and tokens."""


Tries = dict[str, list[list[float]]]
"""The columns of each try, for each way."""


def measured(work: Callable[[], Any], aside: int = 0) -> tuple[list[float], Any]:
    """Seconds, processor seconds and megabytes above the present ones (less ``aside`` bytes), and the result."""
    gc.collect()
    CDLL("libc.so.6").malloc_trim(0)  # else memory that the process holds unused would come for free
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


def compiles(base: torch.Tensor) -> bool:
    try:
        compute_entropy(base.clone())
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


def tries(args: argparse.Namespace) -> Iterator[int]:
    start = time.monotonic()
    for number in range(args.repeats):
        if number < 2 or time.monotonic() < start + args.seconds:
            yield number


def compare_logits(args: argparse.Namespace, tokens: torch.Tensor, weights: torch.Tensor) -> Tries:
    ways: dict[str, Way] = {"upstream eager": upstream_eager}
    base = torch.randn(args.tokens, args.vocabulary).mul_(2).requires_grad_()
    if compiles(base):
        ways["upstream compiled"] = upstream_compiled
    ways |= {"ours": ours, "ours, in place": ours_in_place, **(peers() if args.peers else {})}
    figures: Tries = {name: [] for name in ways}
    reference = None
    for _ in tries(args):
        for name, way in ways.items():
            logits = base.clone()

            def work(way: Way = way, logits: torch.Tensor = logits) -> tuple[torch.Tensor, ...]:
                log_probs, entropy = way(logits, tokens)
                (gradient,) = torch.autograd.grad((log_probs * weights).sum(), logits)
                return log_probs.detach(), entropy.detach(), gradient[::64].clone()

            figure, result = measured(work)
            figures[name].append(figure)
            reference = reference or result
            for one, other in zip(result, reference, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return figures


def compare_hidden(args: argparse.Namespace, tokens: torch.Tensor, weights: torch.Tensor) -> Tries:
    hidden = torch.randn(args.tokens, args.hidden_size).requires_grad_()
    matrix = torch.randn(args.vocabulary, args.hidden_size).mul_(2 / args.hidden_size**0.5).requires_grad_()
    figures = []

    def work() -> None:
        stats = from_hidden(hidden, matrix, tokens, wanted=ALL)
        torch.autograd.grad((stats.log_probs * weights).sum(), (hidden, matrix))

    for _ in tries(args):
        figure, _ = measured(work, aside=matrix.nbytes)
        figures.append(figure)
    return {"ours, from hidden states": figures}


def summed_up(figures: list[list[float]]) -> list[float]:
    """The least time of the tries; of their memory, which nothing disturbs, the median."""
    *times, memory = zip(*figures, strict=True)
    return [*map(min, times), median(memory)]


def report(tried: Tries, upstream: list[float]) -> None:
    for name, figures in tried.items():
        shown = zip(summed_up(figures), upstream, strict=True)
        print(f"{name:26}" + "  ".join(f"{value:9.3f} ({value / best:5.3f})" for value, best in shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden-size", type=int, default=896)
    parser.add_argument("--repeats", type=int, default=4, help="tries of each")
    parser.add_argument("--seconds", type=float, default=40, help="no further tries after this time (at least two)")
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
    of_upstream = [summed_up(tried) for name, tried in figures.items() if "upstream" in name]
    upstream = [min(column) for column in zip(*of_upstream, strict=True)]
    report(figures, upstream)
    if not args.without_hidden:
        report(compare_hidden(args, tokens, weights), upstream)
    print(f"load {os.getloadavg()[0]}")


if __name__ == "__main__":
    main()
