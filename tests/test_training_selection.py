"""Selection of prompts: what counts as one text, one answer, one question; whatever the order of rows."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.rlvr.training_data.select import Rules, select
from openrlhf.rlvr.training_data.sources import InputError
from openrlhf.rlvr.training_data.texts import canonical, finder, folded, is_integer, normalised

ALL = Rules(train=0, validation=0, max_tokens=None)


def asked(question):
    """A question between DAPO-Math-17k's instructions."""
    return (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_order_and_repetition_of_rows_do_not_matter(chance, copies):
    rows = {(asked(f"Question {n}"), str(n % 5), "math_dapo"): 1 for n in range(12)}
    rows[asked("Question  3"), "3", "a variant"] = 1
    rows[asked("Question 4"), "9", "in conflict"] = 1
    shuffled = list(rows)
    chance.shuffle(shuffled)
    rules = Rules(train=6, validation=3, max_tokens=None)
    first, second = select(rows, rules), select(dict.fromkeys(shuffled, copies), rules)
    assert (first.train, first.validation) == (second.train, second.validation)
    assert list(first.conflicts) == list(second.conflicts) == [asked("Question 4")]


def test_variants_of_one_text_are_one_prompt_and_the_least_of_them_stands():
    composed, decomposed = "Café problem  two", unicodedata.normalize("NFD", "Café problem\u00a0two\u200b\n")
    assert composed != decomposed and normalised(composed) == normalised(decomposed) == "Café problem two"
    rows = {(decomposed, "2", "x"): 3, (composed, " +2", "x"): 1, ("Cafe problem two", "2", "x"): 1}
    chosen = select(rows, Rules(train=2, validation=0, max_tokens=None))
    assert {prompt.text for prompt in chosen.train} == {"Cafe problem two", min(composed, decomposed)}
    assert not chosen.conflicts and chosen.counts["different_prompts_and_answers"] == 2


@given(st.text())
def test_a_normal_form_stays_as_it_is(text):
    assert normalised(normalised(text)) == normalised(text)
    assert canonical(canonical(text)) == canonical(text)
    assert folded(normalised(text)) == folded(text)


@pytest.mark.parametrize(
    ("answer", "integer"),
    [("34", "34"), (" +034 ", "34"), ("-3", "-3"), ("−3", "-3"), ("-0", "0"), ("1,234,567", "1234567"), ("7.0", "7")],
)
def test_integers_have_one_form(answer, integer):
    assert canonical(answer) == integer and is_integer(integer)


@pytest.mark.parametrize("answer", ["3.5", "1/2", "\\frac{1}{2}", "12,34", "1e3", "x", "3 4", "٣", "--1", "2^{10}", ""])
def test_other_answers_are_no_integers(answer):
    assert not is_integer(canonical(answer))


LONG = "Let $a$ and $b$ be the two real roots of the equation $x^2 - 7x + 12 = 0$. Find $a + b$."


@pytest.mark.parametrize(
    "prompt",
    [
        LONG,
        asked(LONG),
        LONG.upper(),
        LONG.replace("$", " \\( ").replace(" ", "\n\u00a0"),
        LONG.replace("x^2", "x^{2}").replace("0$.", "0.$"),
        f"A word before. {LONG} Give reasons.",
    ],
)
def test_a_prompt_that_is_or_holds_a_benchmarks_question_is_left_out(prompt):
    question = f"{LONG}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    rows = {(prompt, "7", "x"): 1, (asked("Another"), "1", "x"): 1}
    chosen = select(rows, ALL, [("Find x.", "row 1"), (question, "row 2")])
    assert [(prompt.answer, place) for prompt, place in chosen.overlaps] == [("7", "row 2")]
    assert (chosen.counts["in_benchmarks"], chosen.counts["left"]) == (1, 1)


def test_a_short_question_is_only_found_as_a_whole_and_another_formula_is_another_question():
    find = finder([("Find $x$.", 1), (LONG, 2)])
    assert (find("find x."), find("Find x. Then find y.")) == (1, None)
    assert find(LONG.replace("-", "+")) is None and find(LONG[:-9]) is None


def test_no_validation_prompt_is_a_training_prompt_in_other_spelling():
    """Different ids, for case may matter; but no fair validation."""
    rows = {
        (text, str(n), "x"): 1
        for n in range(8)
        for text in (f"Question ${n}$", f"question {n}", asked(f"Question {n}"))
    }
    chosen = select(rows, Rules(train=9, validation=0, max_tokens=None))
    room = chosen.counts["unused"]
    chosen = select(rows, Rules(train=9, validation=room, max_tokens=None))
    assert chosen.counts["like_a_training_prompt"] == 24 - 9 - room > 0
    trained = {folded(prompt.text) for prompt in chosen.train}
    assert len(chosen.validation) == room and not trained & {folded(prompt.text) for prompt in chosen.validation}


def test_a_limit_without_a_function_that_counts_is_an_error():
    with pytest.raises(InputError, match="needs a tokenizer"):
        select({("a", "1", "x"): 1}, Rules(train=1, validation=0))
