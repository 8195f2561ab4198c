"""The reward of mathematics: what counts as an answer, what counts as equal, that nothing makes it hang or raise."""

import json
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from openrlhf.rlvr.rewards import math, scaled_2, scaled_5, shuffled
from openrlhf.rlvr.rewards.comparer import Comparer

REAL_RESPONSES = Path(__file__).parents[2] / "shared" / "data" / "grading" / "math_responses.jsonl"


@pytest.fixture(scope="module")
def comparer():
    one = Comparer(seconds=3)
    yield one
    one.close()


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{75}.", "75"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed {5}<|end|>", "5"),
        (r"<think>\boxed{1}</think> it is \boxed{2}", "2"),
        (r"\boxed{1}</think> it is 2", None),
        (r"<think> maybe \boxed{1}", None),
        (r"\boxed{1}, no: \boxed{2", None),
        (r"\boxed{}", None),
        ("75", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_complete_box_after_the_reasoning(response, answer):
    assert math.final_answer(response) == answer


@pytest.mark.parametrize(
    ("gold", "answer", "cause"),
    [
        ("75", "75", "same text"),
        (r"\frac{1}{2}", r"$\dfrac{1}{2}$.", "same text"),
        (r"(1,\,2)", r"\left(1, 2\right)", "same text"),
        ("7", "007", "same number"),
        ("31.0", "31", "same number"),
        ("10,000", r"10{,}000", "same text"),
        ("10000", "10,000", "same number"),
        ("75", "74", "other number"),
        ("12", "1,2", "not equivalent"),
        ("75", "27+48", "not evaluated"),
        ("17", "3*4+5", "not evaluated"),
        (r"\frac{1}{2}", "0.5", "equivalent"),
        (r"2\sqrt{3}", r"\sqrt{12}", "equivalent"),
        (r"2\sqrt{3}", r"3\sqrt{2}", "not equivalent"),
        ("75", "7" * 50, "other number"),
        ("75", "x" * 2000, "too long"),
        ("", "75", "no label"),
    ],
)
def test_text_is_compared_first_then_numbers_then_mathematics(gold, answer, cause):
    verdict = math.grade(gold, rf"\boxed{{{answer}}}")
    assert verdict == math.Verdict(cause in ("same text", "same number", "equivalent"), answer, cause)


def test_plain_numbers_are_graded_without_a_second_process(monkeypatch):
    monkeypatch.delattr(math, "_comparer")
    assert math.grade("75", r"\boxed{75}").correct and not math.grade("75", r"\boxed{74}").correct


def test_a_comparison_without_end_is_ended_and_the_next_one_works(comparer):
    comparer.compare("1", "1")  # starts the process
    start = time.monotonic()
    assert comparer.compare("7", "10^{10^{10}}") == "timed out"
    assert time.monotonic() - start < comparer.seconds + 2
    assert comparer.compare(r"\frac{1}{2}", "0.5") == "equivalent"


def test_a_process_that_died_is_replaced(comparer):
    comparer.compare("1", "1")
    comparer._process.kill()
    assert comparer.compare("1", "2") == "comparison failed"
    assert comparer.compare("1", "2") == "not equivalent"


def test_the_process_ends_with_its_owner():
    owner = (
        "import os; from openrlhf.rlvr.rewards.comparer import Comparer; one = Comparer(); one.compare('1', '2');"
        "print(one._process.pid, flush=True); os._exit(1)"
    )
    pid = int(subprocess.run([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True).stdout)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_comparisons_from_many_threads_keep_their_own_answers(comparer):
    pairs = [(str(number), rf"\frac{{{2 * number}}}{{2}}") for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        same = list(pool.map(lambda pair: comparer.compare(*pair), pairs))
        other = list(pool.map(lambda pair: comparer.compare(pair[0] + "1", pair[1]), pairs))
    assert set(same) == {"equivalent"} and set(other) == {"not equivalent"}


def test_a_hundred_thousand_characters_take_no_time():
    start = time.monotonic()
    for text in ("x" * 100_000, r"\boxed{" * 14_000, r"\boxed{" + "{" * 100_000, r"\boxed{" + "9" * 100_000 + "}"):
        assert not math.grade("7", text).correct
    assert time.monotonic() - start < 2


PIECES = ["\\boxed{", "{", "}", "\\", "<think>", "</think>", "7", ",", ".", "$", "-", " ", "é"]
TEXT = st.lists(st.sampled_from(PIECES)).map("".join)


@given(TEXT, TEXT)
@example("\\boxed{7}", "7")
def test_no_response_and_no_label_make_it_raise(response, label):
    with pytest.MonkeyPatch.context() as patch:  # math-verify would take its time over each
        patch.setattr(math, "_compare", lambda gold, answer: "not equivalent")
        result = math.reward_func(["ask" + response], ["ask"], [label])
    assert result["rewards"].tolist() in ([0.0], [1.0])


@given(st.text(alphabet="ab{}\\", max_size=30))
def test_a_box_gives_back_its_balanced_content(content):
    balanced = math._closing_brace(content + "}", 0) == len(content)
    answer = math.final_answer(rf"\boxed{{{content}}} and more")
    assert not balanced or answer == (content.strip() or None)


def test_only_the_response_is_graded():
    prompt = r"<|user|>Put the answer into \boxed{7}.<|end|><|assistant|>"
    queries = [prompt + r"\boxed{7}", prompt + "7", prompt[10:] + r"\boxed{7}", prompt[10:] + "7"]
    result = math.reward_func(queries, [prompt] * 4, ["7", 7, "7", "7"])
    assert result["rewards"].tolist() == result["scores"].tolist() == [1, 0, 1, 0]
    assert result["extra_logs"]["accuracy"].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("question", ["3*4", "3+9", r"3\times 4", r"3 \cdot(4)", "3×4", r"2\times{6}"])
def test_a_question_given_back_is_no_answer(question):
    assert math.grade("12", rf"\boxed{{{question}}}") == math.Verdict(False, question, "not evaluated")


@pytest.mark.skipif(
    not REAL_RESPONSES.exists(), reason=f"needs {REAL_RESPONSES.name}, which is not part of this repository"
)
def test_it_agrees_with_another_grader_on_real_responses(record_property):
    rows = [json.loads(line) for line in REAL_RESPONSES.read_text().splitlines()]
    assert len(rows) == 400
    agreed = [math.grade(row["gold"], row["response"]).correct == row["reference_verdict"] for row in rows]
    record_property("agreement", sum(agreed) / len(agreed))
    # Measured: 399. The one left is 10{,}000 against 10000, which the other grader calls different.
    assert sum(agreed) >= 399


def test_shuffled_rewards_have_the_mean_of_the_true_ones_and_tell_nothing():
    chance = random.Random(0)
    true, paid = [], []
    for _ in range(4000):
        right = chance.random() < 0.3
        result = shuffled.reward_func([r"\boxed{7}" if right else r"\boxed{8}"], [""], ["7"])
        assert result["extra_logs"]["accuracy"].tolist() == [right]
        assert result["scores"].tolist() == result["rewards"].tolist()
        true.append(float(right))
        paid.append(result["rewards"].item())
    assert abs(sum(true) - sum(paid)) <= 2 * shuffled.WAITING
    correlation = torch.corrcoef(torch.tensor([true, paid]))[0, 1].item()
    assert abs(correlation) < 0.06  # 4 standard errors


def test_shuffled_rewards_can_be_asked_for_by_many_threads_at_once():
    results: list[float] = []
    threads = [
        threading.Thread(target=lambda: results.append(shuffled.reward_func([""], [""], ["7"])["rewards"].item()))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20 and set(results) <= {0.0, 1.0}


@pytest.mark.parametrize(("module", "gap"), [(scaled_2, 2), (scaled_5, 5)])
def test_scaled_rewards_pay_more_and_judge_the_same(module, gap):
    result = module.reward_func([r"\boxed{7}", r"\boxed{8}"], ["", ""], ["7", "7"])
    assert result["rewards"].tolist() == [gap, 0]
    assert result["scores"].tolist() == result["extra_logs"]["accuracy"].tolist() == [1, 0]
