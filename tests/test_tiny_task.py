"""The tiny task: problems split honestly, a model that ordinary tools load, a folder made the same way every time."""

import json
import re
import string
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.rlvr.tiny_task import __main__ as command
from openrlhf.rlvr.tiny_task import make as making
from openrlhf.rlvr.tiny_task import problems, warm_up
from openrlhf.rlvr.tiny_task.accuracy import accuracy
from openrlhf.rlvr.tiny_task.make import Recipe, make
from openrlhf.rlvr.tiny_task.model import BOX, CHARACTERS, chat_prompt, make_model, make_tokenizer, save

MATH_PROMPTS = Path(__file__).parents[2] / "shared" / "data" / "train" / "math8k.json"
SHORT = Recipe(seed=3, warm_up_steps=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder whose model was hardly warmed up."""
    folder = tmp_path_factory.mktemp("tiny") / "task"
    assert make(folder, SHORT)
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_mathematics(question: str) -> tuple:
    """The expression in a question, whatever its spaces and the order of its terms and factors."""
    terms = question.replace(" ", "").removesuffix("=?").split("+")
    return tuple(sorted(tuple(sorted(map(int, term.split("*")))) for term in terms))


def test_every_problem_has_its_value_and_a_slip_that_is_wrong():
    for problem in problems.all_problems():
        assert re.fullmatch(r"[\d+*]+", problem.expression)
        assert problem.answer == eval(problem.expression) != problem.slip >= 0


@given(st.integers(0, 2**63))
@settings(max_examples=5, deadline=None)
def test_held_out_problems_are_unknown_in_every_form(seed):
    split = problems.split(seed)
    held_out = [as_mathematics(problem.question) for problem in split.validation]
    known = {as_mathematics(problem.question) for level in split.known.values() for problem in level}
    assert len(set(held_out)) == len(held_out) >= 500
    assert not known & set(held_out)
    assert len(set(Counter(problem.level for problem in split.validation).values())) == 1


def test_prompts_are_rows_of_text_drawn_from_the_known_problems(small):
    train, validation = rows(small / "train.jsonl"), rows(small / "validation.jsonl")
    split = problems.split(SHORT.seed)
    assert validation == [problem.row() for problem in split.validation]
    known = {tuple(problem.row().items()) for level in split.known.values() for problem in level}
    assert {tuple(row.items()) for row in train} <= known
    assert len({row["input"] for row in train}) == len(train) == 4 * problems.TRAINING_PER_LEVEL
    first = Counter(row["datasource"] for row in train[:200])  # a run may take only the first rows
    assert len(first) == 4 and min(first.values()) > 20


def test_the_tokenizer_reads_all_printable_text_character_by_character():
    tokenizer = make_tokenizer()
    text = string.printable.replace("\r", "").replace("\v", "").replace("\f", "")
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text) == len(CHARACTERS)
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == text
    assert tokenizer.tokenize(BOX + "75}") == [BOX, "7", "5", "}"]
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


@pytest.mark.skipif(not MATH_PROMPTS.exists(), reason="the real prompts are not part of this repository")
def test_real_prompts_hold_no_unknown_character():
    tokenizer = make_tokenizer()
    for row in json.loads(MATH_PROMPTS.read_text())[::50]:
        prompt = chat_prompt(tokenizer, row["prompt"])
        tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens, skip_special_tokens=False) == prompt


def test_the_model_is_an_ordinary_folder(small):
    model = AutoModelForCausalLM.from_pretrained(small / "model")
    tokenizer = AutoTokenizer.from_pretrained(small / "model")
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.dtype == torch.bfloat16
    assert 200_000 < model.num_parameters() < 500_000
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert len(tokenizer) == model.config.vocab_size
    assert chat_prompt(tokenizer, "3+4=?") == "<|user|>3+4=?<|end|><|assistant|>"


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_is_read_as_it_was(tmp_path, tied):
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, tied)
    save(model, tokenizer, tmp_path)
    read, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert (read.lm_head.weight is read.model.embed_tokens.weight) is tied
    assert all(torch.equal(tensor, model.bfloat16().state_dict()[name]) for name, tensor in read.state_dict().items())


def test_the_same_recipe_makes_the_same_bytes_and_another_seed_others(small, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(99)
    try:
        make(tmp_path / "again", SHORT)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (small / "manifest.json").read_bytes()
    make(tmp_path / "other", Recipe(seed=4, warm_up_steps=2))
    first, other = (json.loads((folder / "manifest.json").read_text()) for folder in (small, tmp_path / "other"))
    changed = {name for name in first["files"] if first["files"][name] != other["files"][name]}
    assert changed == {"train.jsonl", "validation.jsonl", "model/model.safetensors"}


def test_a_folder_is_made_once_and_again_when_it_is_not_what_was_asked_for(small, monkeypatch):
    monkeypatch.setattr(making, "_fill", lambda folder, recipe: (folder / "manifest.json").write_text("new"))
    before = (small / "manifest.json").read_text()
    assert not make(small, SHORT)
    assert not making.is_made(small, Recipe(seed=4, warm_up_steps=2))
    prompts = (small / "train.jsonl").read_text()
    (small / "train.jsonl").write_text("edited")
    assert not making.is_made(small, SHORT)
    (small / "train.jsonl").write_text(prompts)
    assert making.is_made(small, SHORT) and (small / "manifest.json").read_text() == before


def test_a_changed_folder_is_replaced_as_a_whole(tmp_path, monkeypatch):
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "old").touch()
    monkeypatch.setattr(making, "_fill", lambda folder, recipe: (folder / "new").touch())
    assert make(folder, SHORT)
    assert [path.name for path in folder.iterdir()] == ["new"]


def test_a_failure_leaves_nothing_half_made(tmp_path, monkeypatch):
    def fail(folder, recipe):
        (folder / "train.jsonl").touch()
        raise RuntimeError("stopped")

    monkeypatch.setattr(making, "_fill", fail)
    with pytest.raises(RuntimeError, match="stopped"):
        make(tmp_path / "task", SHORT)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_somebody_elses_folder_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.tex").touch()
    monkeypatch.setattr("sys.argv", ["tiny_task", "--output", str(tmp_path)])
    assert command.main() == 1
    assert "has no manifest.json" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_warming_up_teaches_the_form_of_an_answer():
    tokenizer = make_tokenizer()
    known = problems.split(0).known
    with warm_up.repeatable(0):
        model = make_model(tokenizer, tied=False)
        warm_up.warm_up(model, tokenizer, known, seed=0, steps=60)
        prompts = tokenizer([chat_prompt(tokenizer, "12+34=?")] * 64, return_tensors="pt")["input_ids"]
        answers = tokenizer.batch_decode(model.generate(prompts, max_new_tokens=6)[:, prompts.shape[1] :])
    formed = [re.match(r"(\\boxed\{)?\d+\}?<\|end\|>", answer) for answer in answers]
    assert sum(map(bool, formed)) > 48


def test_accuracy_counts_right_answers_by_level():
    tokenizer = make_tokenizer()

    class Oracle:
        def generate(self, input_ids, **_):
            questions = [text.split("<|user|>")[1].split("=?")[0] for text in tokenizer.batch_decode(input_ids)]
            answers = [f"{BOX}{eval(question) + ('*' in question)}}}<|end|>" for question in questions]
            return torch.cat([input_ids, tokenizer(answers, padding=True, return_tensors="pt")["input_ids"]], dim=1)

    few = [problem.row() for problem in problems.split(0).validation[:40]]
    right = sum(row["datasource"] != "product" for row in few) / len(few)
    shares = accuracy(Oracle(), tokenizer, few, samples=2)
    assert shares == {"all": right, "ones": 1, "tens": 1, "carry": 1, "product": 0}


@pytest.mark.slow
def test_the_warmed_up_model_is_sometimes_right_and_certainty_alone_would_not_help(task):
    measured = json.loads((task / "manifest.json").read_text())["validation_accuracy"]
    sampled, greedy = measured["sampled"], measured["greedy"]
    assert 0.1 <= sampled["all"] <= 0.5
    assert sampled["ones"] > sampled["tens"] > sampled["carry"] > sampled["product"] > 0
    assert greedy["carry"] < sampled["carry"] and greedy["all"] < sampled["all"] + 0.05
