"""Training files: from small files in the style of DAPO-Math-17k, from real ones, and from what is wrong in them."""

import json
import random
import sys
import uuid

import datasets
import pyarrow
import pytest
import trainer
from pyarrow import parquet

from openrlhf.rlvr.training_data import __main__ as command
from openrlhf.rlvr.training_data.texts import bare_question, identity, is_integer

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def asked(question):
    return f"{BEFORE}{question}{AFTER}"


def published(question, answer):
    """A row with the columns of the published file; the index differs in every row."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": asked(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(uuid.uuid4())},
    }


def problems(number):
    return [published(f"What is {n} times {n}, if {n} stays what it is?", str(n * n)) for n in range(number)]


def write(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=64)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows, indent=2))
    return path


def read(folder, name="train"):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


class Outcome:
    """Of one call of the command: its exit status, what it printed, and the folder that it was told to make."""

    def __init__(self, status, printed, folder):
        self.status, self.printed, self.folder = status, printed, folder

    @property
    def manifest(self):
        return json.loads((self.folder / "manifest.json").read_text())


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """Run the command on a file, without a limit of tokens unless told otherwise."""
    calls = iter(range(100))

    def run(data, *options, train=0, validation=0, tokens=("--max-tokens", "0")):
        folder = tmp_path / f"made-{next(calls)}"
        sizes = ["--train", str(train), "--validation", str(validation)]
        line = ["prepare", "dapo", "--input", str(data), "--output", str(folder), *sizes, *tokens, *map(str, options)]
        monkeypatch.setattr(sys, "argv", ["training_data", *line])
        status = command.main()
        out, err = capsys.readouterr()
        return Outcome(status, out + err, folder)

    return run


def refused(outcome, *said):
    assert outcome.status == 1 and not outcome.folder.exists()
    assert outcome.printed.startswith("training data: ")
    for text in said:
        assert text in outcome.printed


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_a_hundred_copies_of_each_prompt_make_one_row_each(prepare, tmp_path, suffix):
    rows = [published(**one) for one in [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]]
    copies = [{**row, "extra_info": {"index": str(uuid.uuid4())}} for _ in range(100) for row in rows]
    made = prepare(write(tmp_path / f"rows{suffix}", copies), train=15, validation=5)
    assert made.status == 0
    found = [*read(made.folder), *read(made.folder, "validation")]
    assert [len(read(made.folder)), len(found)] == [15, 20]
    assert {row["input"]: row["label"] for row in found} == {
        asked(f"What is {n} + {n}?"): str(2 * n) for n in range(20)
    }
    assert {row["datasource"] for row in found} == {"math_dapo"}
    counts = made.manifest["counts"]
    assert [counts[name] for name in ("rows", "different_prompts", "left", "unused")] == [2000, 20, 20, 0]
    assert "rows: 2000" in made.printed


def test_ids_are_hashes_of_normalised_prompt_and_answer_in_whose_order_prompts_are_taken(prepare, tmp_path):
    made = prepare(write(tmp_path / "rows.parquet", problems(30)), train=20, validation=10)
    found = [*read(made.folder), *read(made.folder, "validation")]
    assert [row["id"] for row in found] == sorted({row["id"] for row in found}) and len(found) == 30
    for row in found:
        assert row["id"] == identity(" ".join(row["input"].split()), row["label"])
    assert identity("What is 1+1?", "2") == "b7885d3c82821bcb"


def test_shuffled_files_make_the_same_bytes(prepare, tmp_path):
    rows = problems(40) * 3
    ordered = prepare(write(tmp_path / "ordered.jsonl", rows), train=25, validation=10)
    random.Random(1).shuffle(rows)
    shuffled = prepare(write(tmp_path / "shuffled.parquet", rows), train=25, validation=10)
    assert ordered.manifest["files"] == shuffled.manifest["files"]
    assert ordered.manifest["counts"] == shuffled.manifest["counts"]
    inputs = [made.manifest["input"] for made in (ordered, shuffled)]
    assert inputs[0]["sha256"] != inputs[1]["sha256"]
    assert inputs[0]["different_rows_sha256"] == inputs[1]["different_rows_sha256"]


def test_prompts_without_an_integer_answer_are_left_out_unless_asked_for(prepare, tmp_path):
    rows = [*problems(3), published("A half?", "\\frac{1}{2}"), published("Nothing?", "")]
    path = write(tmp_path / "rows.jsonl", rows)
    counts = prepare(path, train=3).manifest["counts"]
    assert (counts["without_integer_answer"], counts["without_answer"], counts["left"]) == (1, 1, 3)
    made = prepare(path, "--answers", "any", train=4)
    assert "\\frac{1}{2}" in {row["label"] for row in read(made.folder)}


def test_numbers_in_json_are_answers(prepare, tmp_path):
    path = write(tmp_path / "rows.jsonl", [published("One?", 1), published("Two?", 2.0), published("Half?", 0.5)])
    assert {row["label"] for row in read(prepare(path, train=2).folder)} == {"1", "2"}


def test_prompts_with_two_answers_are_listed_and_left_out_or_refused(prepare, tmp_path):
    rows = [*problems(4), published("Which?", "1"), published("Which?", "1"), published("Which? ", "2")]
    path = write(tmp_path / "rows.parquet", rows)
    made = prepare(path, train=4)
    assert made.manifest["counts"]["with_different_answers"] == 1
    assert read(made.folder, "conflicts") == [{"input": asked("Which?"), "answers": {"1": 2, "2": 1}}]
    assert not any("Which?" in row["input"] for row in read(made.folder))
    refused(prepare(path, "--conflicts", "refuse"), "1 prompts have different answers", "Which?", "1, 2", "drop")
    same = write(tmp_path / "same.jsonl", [published("Which?", "1"), published("Which?", "1.0")])
    assert prepare(same, "--conflicts", "refuse", train=1).status == 0


def test_bare_questions_and_questions_with_the_benchmarks_instruction(prepare, tmp_path):
    unknown = {**published("", "5"), "prompt": "A question by itself"}
    path = write(tmp_path / "rows.jsonl", [published("What is $2$?\n\nSay it.", "2"), unknown])
    assert {row["input"] for row in read(prepare(path, train=2).folder)} == {
        asked("What is $2$?\n\nSay it."),
        "A question by itself",
    }
    bare = prepare(path, "--question", "bare", train=2)
    assert {row["input"] for row in read(bare.folder)} == {"What is $2$?\n\nSay it.", "A question by itself"}
    assert bare.manifest["counts"]["without_known_instruction"] == 1
    boxed = read(prepare(path, "--question", "boxed", train=2).folder)
    assert {bare_question(row["input"]) for row in boxed} == {"What is $2$?\n\nSay it.", "A question by itself"}
    assert all(
        row["input"].endswith("\nPlease reason step by step, and put your final answer within \\boxed{}.")
        for row in boxed
    )


def test_benchmark_files_are_counted_and_overlaps_listed(prepare, tmp_path):
    data = write(tmp_path / "rows.parquet", problems(6))
    first = write(
        tmp_path / "first.jsonl", [{"problem": f"What is {n} times {n}, if {n} stays what it is?"} for n in (1, 4)]
    )
    second = write(tmp_path / "second.json", [{"question": "Nobody asks this"}])
    made = prepare(data, "--exclude", first, second, train=4)
    assert [benchmark["overlaps"] for benchmark in made.manifest["benchmarks"]] == [2, 0]
    assert {row["label"]: row["benchmark"] for row in read(made.folder, "overlaps")} == {
        "1": f"{first}: line 1",
        "16": f"{first}: line 2",
    }
    assert {row["label"] for row in read(made.folder)} == {"0", "4", "9", "25"}


def test_too_few_prompts_are_told_with_what_each_rule_took(prepare, tmp_path):
    path = write(tmp_path / "rows.jsonl", [*problems(5), published("A half?", "0.5")])
    refused(prepare(path, train=4, validation=2), "only 1 prompts for --validation 2", "without_integer_answer 1")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of one token a character."""
    from openrlhf.rlvr.tiny_task.model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


def test_the_limit_counts_the_models_tokens_with_its_template_if_asked(prepare, tmp_path, tokenizer):
    import transformers

    made = transformers.AutoTokenizer.from_pretrained(tokenizer)
    rows = [{**published("", "1"), "prompt": "1+1=" * n} for n in range(1, 5)]
    path = write(tmp_path / "rows.jsonl", rows)
    limit = len(made("1+1=" * 3).input_ids)
    counts = prepare(path, train=3, tokens=("--max-tokens", str(limit), "--tokenizer", str(tokenizer))).manifest[
        "counts"
    ]
    assert counts["too_long"] == 1
    chat = ("--max-tokens", str(limit), "--tokenizer", str(tokenizer), "--apply-chat-template")
    manifest = prepare(path, tokens=chat).manifest
    assert manifest["counts"]["too_long"] > 1
    assert manifest["settings"]["tokenizer"] == {"name": str(tokenizer), "chat": True}


def test_the_limit_needs_a_tokenizer(prepare, tmp_path):
    path = write(tmp_path / "rows.jsonl", problems(1))
    refused(prepare(path, tokens=()), "1024 tokens", "needs the model's tokenizer", "--tokenizer", "--max-tokens 0")
    refused(prepare(path, tokens=("--tokenizer", str(tmp_path))), f"--tokenizer {tmp_path}: no tokenizer can be loaded")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": None}, "line 3: 'prompt' is null"),
        ({"prompt": "  "}, "line 3: 'prompt': expected the text of a prompt"),
        ({"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}, "['system', 'user']"),
        ({"prompt": [{"role": "user"}]}, "line 3: 'prompt': 'content' is missing"),
        ({"reward_model": {"style": "rule"}}, "line 3: 'reward_model.ground_truth' is missing at 'ground_truth'"),
        ({"reward_model": "5"}, "line 3: 'reward_model.ground_truth' is missing at 'ground_truth': '5' holds no keys"),
        ({"reward_model": {"ground_truth": True}}, "expected an answer, as text or a number, not True"),
        ({"data_source": None}, "line 3: 'data_source' is null"),
    ],
)
def test_a_faulty_row_is_told_with_file_row_and_key(prepare, tmp_path, change, said):
    path = write(tmp_path / "rows.jsonl", [*problems(2), {**problems(1)[0], **change}])
    refused(prepare(path), f"{path}: line 3: ", said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "a"}\n[1]\n', "line 2: expected an object {...}, not list"),
        ('{"prompt": "a"\n', "line 1: is not JSON"),
        ('[{"prompt": "a",}]', "line 1: is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        ("", "holds no rows"),
    ],
)
def test_a_faulty_file_is_told(prepare, tmp_path, content, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = ["--answer-key", "prompt", "--datasource", "x"]
    refused(prepare(path, *options), str(path), said)


def test_parquet_without_a_column_and_what_is_no_parquet_are_told(prepare, tmp_path):
    path = write(tmp_path / "rows.parquet", [{"question": "What?", "answer": "1"}])
    refused(prepare(path), f"{path}: has no column 'prompt'; there are question, answer")
    made = prepare(path, "--prompt-key", "question", "--answer-key", "answer", "--datasource", "mine", train=1)
    assert [row["datasource"] for row in read(made.folder)] == ["mine"]
    path.write_text("PAR1 but not really")
    refused(prepare(path), f"{path}: cannot be read as a parquet file")


def test_missing_and_unknown_files_are_told(prepare, tmp_path):
    refused(prepare(tmp_path / "none.parquet"), "none.parquet: no such file")
    refused(prepare("a/b/c"), "a/b/c: no such file, nor a data set's name")
    (tmp_path / "rows.csv").write_text("prompt\n")
    refused(prepare(tmp_path / "rows.csv"), "rows.csv: expected a file that ends in .parquet, .json, .jsonl")
    path = write(tmp_path / "rows.jsonl", problems(1))
    refused(prepare(path, "--exclude", "gone.jsonl"), "--exclude gone.jsonl: no such file")
    odd = write(tmp_path / "odd.jsonl", [{"text": "What?"}])
    refused(prepare(path, "--exclude", odd), f"{odd}: line 1: expected a question at one of problem", "there are text")


def test_an_earlier_folder_is_not_overwritten(prepare, tmp_path):
    path = write(tmp_path / "rows.jsonl", problems(2))
    (tmp_path / "made-0").mkdir()
    assert prepare(path, train=1).status == 0
    (tmp_path / "made-1").mkdir()
    (tmp_path / "made-1" / "mine").touch()
    again = prepare(path, train=1)
    assert again.status == 1 and "is there already" in again.printed
    assert [one.name for one in again.folder.iterdir()] == ["mine"]


def test_a_data_set_is_loaded_by_the_datasets_library(prepare, tmp_path, monkeypatch):
    """A folder laid out as on the hub, which the library loads by the same call."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    local = write(folder / "dapo.parquet", problems(9) * 2)
    made = prepare(tmp_path / "hub", train=5, validation=4)
    assert made.manifest["files"] == prepare(local, train=5, validation=4).manifest["files"]
    assert made.manifest["input"]["rows"] == 18 and made.manifest["input"]["hash"]
    refused(prepare(tmp_path / "hub", "--split", "test"), "the data set cannot be loaded", "test")


def test_without_the_hub_a_local_file_is_asked_for(prepare, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    outcome = prepare("nobody/such-a-data-set")
    refused(outcome, "nobody/such-a-data-set: the data set cannot be loaded", "give the path of that file")


SHARED = trainer.REPO.parent / "shared" / "data"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data for tests is not laid beside the project here")
def test_real_prompts_and_benchmarks(prepare):
    benchmarks = sorted((SHARED / "benchmarks").glob("*.jsonl"))
    keys = ("--answer-key", "answer", "--datasource", "math")
    made = prepare(SHARED / "train" / "math8k.json", *keys, "--exclude", *benchmarks, train=4000, validation=500)
    assert made.status == 0
    rows = [*read(made.folder), *read(made.folder, "validation")]
    assert len({row["id"] for row in rows}) == len({" ".join(row["input"].split()) for row in rows}) == 4500
    assert all(is_integer(row["label"]) for row in rows)
    # Both have "The four zeros of the polynomial x⁴ + jx² + kx + 225", set as x^{4} + j x^{2} + k x + 225 in one.
    assert "-50" in {row["label"] for row in read(made.folder, "overlaps")}
    assert not any("The four zeros of the polynomial $x^4 + jx^2 + kx + 225$" in row["input"] for row in rows)
    counts = made.manifest["counts"]
    assert counts["rows"] == 8523 and counts["without_answer"] == 2
    taken = sum(counts[name] for name in ("without_answer", "without_integer_answer", "in_benchmarks"))
    assert counts["different_prompts"] - taken - counts["with_different_answers"] == counts["left"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data for tests is not laid beside the project here")
def test_a_real_benchmark_is_found_whole_in_itself(prepare):
    path = SHARED / "benchmarks" / "olympiadbench.jsonl"
    keys = ("--prompt-key", "problem", "--answer-key", "answer", "--datasource", "olympiad", "--answers", "any")
    made = prepare(path, *keys, "--question", "bare", "--exclude", path)
    assert made.manifest["counts"]["left"] == 0
    assert made.manifest["counts"]["without_known_instruction"] == 0
