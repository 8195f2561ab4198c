"""What a run reads is looked at before it starts: paths, models, prompts, reward functions."""

import json
from pathlib import Path
from typing import Any

import pytest

from slurm import ROOT
from slurm.config import Config, Setting
from slurm.inputs import absolute, look_at_inputs

ROWS = [{"input": f"{n}+1", "label": str(n + 1), "datasource": "odd" if n % 2 else "even"} for n in range(10)]
REWARD = "def reward_func(queries, prompts, labels, **kwargs):\n    return {}\n"


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    (tmp_path / "validation.json").write_text(json.dumps(ROWS[:3]))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def config(folder: Path, **changed: Any) -> Config:
    values = {
        "actor.model_name_or_path": str(folder / "model"),
        "data.prompt_dataset": str(folder / "train.jsonl"),
        "data.label_key": "label",
        "reward.remote_url": str(folder / "reward.py"),
        "rollout.batch_size": 4,
    } | {key.replace("__", "."): value for key, value in changed.items()}
    return absolute(Config("any", {key: Setting(value, "r.yaml:1") for key, value in values.items()}))


def faults(config: Config) -> list[str]:
    return [str(problem) for problem in look_at_inputs(config).problems]


def test_sound_inputs_are_counted(folder: Path) -> None:
    inputs = look_at_inputs(config(folder, eval__dataset=str(folder / "validation.json")))
    assert inputs.problems == []
    (train,), (validation,) = inputs.facts["data.prompt_dataset"], inputs.facts["eval.dataset"]
    assert (train.rows, train.by_source) == (10, {"even": 5, "odd": 5})
    assert (validation.rows, validation.by_source) == (3, {"even": 2, "odd": 1})
    assert len(train.sha256) == 64


def test_relative_paths_are_meant_from_the_repositorys_root_and_hub_names_are_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    made = absolute(
        config(
            folder,
            actor__model_name_or_path="Qwen/Qwen2.5-0.5B",
            data__prompt_dataset="build/tiny/train.jsonl, org/set@part,../x.json",
            reward__remote_url="https://host/judge,slurm/schema.py",
        )
    )
    assert made["actor.model_name_or_path"] == "Qwen/Qwen2.5-0.5B"
    assert made["data.prompt_dataset"] == f"{ROOT}/build/tiny/train.jsonl,org/set@part,{ROOT.parent}/x.json"
    assert made["reward.remote_url"] == f"https://host/judge,{ROOT}/slurm/schema.py"
    assert made.settings["reward.remote_url"].where == "r.yaml:1"


BAD_DATA = {
    "": "holds no rows",
    "\n\n": "holds no rows",
    "[]": "holds no rows",
    lines(
        [{"input": "1", "label": "1"}, {"input": "2"}]
    ): "line 2: 'label' (data.label_key) is missing; there are input",
    lines([{"prompt": "1", "label": "1"}]): "line 1: 'input' (data.input_key) is missing; there are prompt, label",
    lines([{"input": "1", "label": None}]): "line 1: 'label' (data.label_key) is null there",
    lines(
        [{"input": "1", "label": " "}, {"input": "2", "label": ""}]
    ): "'label' (data.label_key) is empty in every row",
    lines([{"input": "1", "label": True}]): "'label' (data.label_key) is true there: expected text or a number",
    lines([{"input": "", "label": "1"}]): "line 1: 'input' (data.input_key) is empty there",
    lines([{"input": [], "label": "1"}]): "line 1: 'input' (data.input_key) is empty there",
    lines([{"input": False, "label": "1"}]): "'input' (data.input_key) is false there: expected a prompt",
    "[" * 100_000: "the array: nested too deeply",
    lines([["1", "2"]])[1:]: "line 1: not JSON",
    lines([ROWS[0]]) + '"text"\n': "line 2 is not an object {..} but str",
    lines([ROWS[0]]) + "{oops\n": "line 2: not JSON (Expecting property name enclosed in double quotes), near 'oops'",
    "[" + json.dumps(ROWS[0]) + ", 3]": "row 2 is not an object {..} but int",
    '[{"input": "1"': "the array: not JSON (Expecting ',' delimiter)",
    json.dumps(ROWS, indent=1)[:-2]: "the array: not JSON",
}


@pytest.mark.parametrize(("text", "message"), BAD_DATA.items())
def test_a_fault_in_the_prompts_is_told_with_file_row_and_key(folder: Path, text: str, message: str) -> None:
    (folder / "train.jsonl").write_text(text)
    (fault,) = faults(config(folder))
    assert fault.startswith(f"r.yaml:1: data.prompt_dataset: {folder}/train.jsonl: ")
    assert message in fault


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("actor.model_name_or_path", "./nowhere", "no such file or folder: nowhere"),
        ("actor.model_name_or_path", "build/nowhere", "no such file or folder: build/nowhere"),
        ("actor.model_name_or_path", "slurm", "slurm is not a model: a folder with config.json is expected"),
        ("actor.model_name_or_path", "org/never-downloaded", "is neither a path below"),
        ("data.prompt_dataset", "missing.jsonl", "no such file or folder: missing.jsonl"),
        ("reward.remote_url", "missing.py", "no such file or folder: missing.py"),
        ("reward.remote_url", "slurm/schema.py", "slurm/schema.py defines no `reward_func`"),
        ("reward.remote_url", "pyproject.toml", "pyproject.toml is not a Python file"),
        ("train.agent_func_path", "slurm/schema.py", "slurm/schema.py defines no `AgentExecutor`"),
    ],
)
def test_an_input_that_is_not_there_or_is_not_what_it_should_be_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, message: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    (fault,) = faults(config(folder, **{key: value}))
    assert fault.startswith(f"r.yaml:1: {key}: ")
    assert message in fault


def test_a_hub_name_is_accepted_once_it_is_in_the_cache_or_may_be_downloaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder))
    assert faults(config(folder, actor__model_name_or_path="org/model", launch__offline=False)) == []
    (folder / "hub" / "models--org--model").mkdir(parents=True)
    assert faults(config(folder, actor__model_name_or_path="org/model")) == []


@pytest.mark.parametrize(
    ("code", "message"),
    {
        "def reward_func(:\n": "reward.py:1: not Python: ",
        "def reward(): ...\n": "defines no `reward_func`",
        "from elsewhere import graded as reward_func\n": None,
        "reward_func = max\n": None,
    }.items(),
)
def test_a_reward_function_must_be_defined(folder: Path, code: str, message: str | None) -> None:
    (folder / "reward.py").write_text(code)
    told = faults(config(folder))
    assert [message in fault for fault in told] == ([True] if message else [])


def test_what_a_preparation_will_make_is_not_looked_for(folder: Path) -> None:
    made = config(folder, data__prompt_dataset=str(folder / "later" / "train.jsonl"))
    assert look_at_inputs(made, folder / "later").problems == []
    assert look_at_inputs(made).problems != []


def test_validation_prompts_that_are_trained_on_are_warned_of(folder: Path) -> None:
    (folder / "validation.json").write_text(json.dumps([*ROWS[:3], {"input": "new", "label": "1"}]))
    inputs = look_at_inputs(config(folder, eval__dataset=str(folder / "validation.json"), rollout__batch_size=5))
    assert inputs.warnings == ["3 of 4 validation prompts are training prompts too: the gain will flatter"]
    (folder / "validation.json").write_text(json.dumps([{"input": "new", "label": "1"}]))
    made = config(folder, eval__dataset=str(folder / "validation.json"), rollout__batch_size=5)
    assert look_at_inputs(made).warnings == []


IDS = [{"input": f"{n}+1", "label": str(n + 1), "id": f"p{n}"} for n in range(4)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "9+9", "label": "18"}, "line 5: 'id' (data.id_key) is missing; there are input, label"),
        ({"input": "9+9", "label": "18", "id": None}, "line 5: 'id' (data.id_key) is null there"),
        ({"input": "9+9", "label": "18", "id": " "}, "line 5: 'id' (data.id_key) is empty there"),
        ({"input": "9+9", "label": "18", "id": True}, "(data.id_key) is true there: expected text or a number"),
        ({"input": "9+9", "label": "18", "id": ["ä"]}, """(data.id_key) is ["ä"] there: expected text or a number"""),
        ({"input": "9+9", "label": "18", "id": 7}, None),
    ],
)
def test_every_training_prompt_has_the_id_that_is_asked_for(
    folder: Path, row: dict[str, Any], message: str | None
) -> None:
    (folder / "train.jsonl").write_text(lines([*IDS, row]))
    validation = str(folder / "validation.json")
    told = faults(config(folder, data__id_key="id", eval__dataset=validation))
    assert [message in fault for fault in told] == ([True] if message else [])
    assert faults(config(folder)) == []


MERGE = "or write algo.allocation.duplicates: merge to count them as one prompt"


@pytest.mark.parametrize(
    ("row", "id_key", "message"),
    [
        ({"input": "1+1", "label": "2", "id": "new"}, None, "line 6 has the 'input' and 'label' of line 2, and"),
        ({"input": "1+1", "label": 2, "id": "new"}, None, "line 6 has the 'input' and 'label' of line 2, and"),
        ({"input": "1+1", "label": "3", "id": "new"}, None, None),
        ({"input": "1+1", "label": "2", "id": "new"}, "id", None),
        (
            {"input": "9+9", "label": "18", "id": "p1"},
            "id",
            "line 6 has the 'id' (data.id_key) p1 of line 2, and their",
        ),
    ],
)
def test_two_prompts_of_one_identity_are_refused_where_samples_are_shared_out(
    folder: Path, row: dict[str, Any], id_key: str | None, message: str | None
) -> None:
    (folder / "train.jsonl").write_text(lines(IDS) + "\n" + lines([row]))
    given = {"algo__allocation__strategy": "uniform", "data__id_key": id_key}
    told = faults(config(folder, **given))
    assert [message in fault and fault.endswith(MERGE) for fault in told if message] == [True] * bool(message)
    assert len(told) == bool(message)
    assert faults(config(folder, **given, algo__allocation__duplicates="merge")) == []
    assert faults(config(folder, **given, data__max_samples=4)) == []
    assert faults(config(folder, data__id_key=id_key)) == []


def test_an_identity_of_another_file_is_found_with_the_name_of_both(folder: Path) -> None:
    (folder / "more.json").write_text(json.dumps([{"input": "new", "label": "1"}, ROWS[3]]))
    both = f"{folder}/train.jsonl,{folder}/more.json"
    given = {"data__prompt_dataset": both, "algo__allocation__strategy": "dynamic"}
    (fault,) = faults(config(folder, **given))
    assert f"{folder}/more.json: row 2 has the 'input' and 'label' of {folder}/train.jsonl: line 4, and their" in fault
    assert faults(config(folder, **given, data__max_samples=11)) == []


def test_rows_without_a_label_are_warned_of_where_they_are_used(folder: Path) -> None:
    rows = [{"input": str(n), "label": " " if n in (2, 5) else "1"} for n in range(8)]
    (folder / "train.jsonl").write_text(lines(rows))
    (warning,) = look_at_inputs(config(folder)).warnings
    told = "'label' (data.label_key) is empty in row 3, 6: no answer there can be right"
    assert warning == f"{folder}/train.jsonl: {told}"
    (warning,) = look_at_inputs(config(folder, data__max_samples=4)).warnings
    assert "is empty in row 3: " in warning
    assert faults(config(folder, data__label_key=None)) == []


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ({}, 3),
        ({"train__num_episodes": 4}, 12),
        ({"rollout__batch_size": 5}, 2),
        ({"data__max_samples": 8}, 2),
        ({"rollout__vllm_generate_batch_size": 2}, 5),
        ({"rollout__vllm_generate_batch_size": 8, "train__async_enable": True}, 3),
        ({"algo__allocation__strategy": "dynamic"}, 3),
        ({"algo__allocation__strategy": "dynamic", "train__num_episodes": 4}, 12),
        ({"algo__allocation__strategy": "dynamic", "rollout__vllm_generate_batch_size": 8}, 3),
        ({"algo__dynamic_filtering_enable": True}, None),
        ({"data__prompt_probs": "1.0"}, None),
        ({"data__prompt_dataset": "org/data", "launch__offline": False}, None),
    ],
)
def test_the_steps_of_a_run_are_known_where_they_can_be(
    folder: Path, changed: dict[str, Any], steps: int | None
) -> None:
    made = config(folder, **changed)
    assert look_at_inputs(made).steps(made) == steps


def test_a_last_step_with_fewer_prompts_is_warned_of(folder: Path) -> None:
    (warning,) = look_at_inputs(config(folder)).warnings
    assert warning == "10 prompts are no multiple of rollout.batch_size 4: an episode's last step has 2"
