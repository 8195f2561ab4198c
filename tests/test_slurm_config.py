"""Configurations: what is read, what is refused and in which words, and that all of it reaches the trainer."""

import argparse
import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm import ROOT
from slurm.checks import faults as faults_between
from slurm.config import LAUNCH_FLAGS, Config, Setting, known_flags, read_config
from slurm.problems import ConfigError, UserError
from slurm.schema import FLAGS_FILE, OWNED, Flag, Raw, installed_flags, trainer_flags


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def faults(recipe: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config(recipe, overrides)
    return str(caught.value).splitlines()


BAD_LINES = {
    "actor.adam.lrr: 1": "no such flag; did you mean actor.adam.lr",
    "n_samples_per_prompt: 4": "no such flag; did you mean eval.n_samples_per_prompt or rollout.n_samples_per_prompt",
    "zzz: 4": "no such flag; all names are in slurm/flags.json",
    "train.batch_size: 1.5": "expected an integer, found 1.5",
    "train.batch_size: 1e3": "expected an integer, found 1e3",
    "train.batch_size: '8'": "expected an integer, found the text '8'",
    "train.batch_size: true": "expected an integer, found true",
    "train.batch_size: [8]": "expected an integer, found a list of 1",
    "actor.adam.lr: high": "expected a number, found the text 'high'",
    "actor.adam.lr: .nan": "expected a number, found .nan",
    "actor.adam.lr: true": "expected a number, found true",
    "vllm.enforce_eager: yes": "expected true or false, found the text 'yes'",
    "vllm.enforce_eager: 1": "expected true or false, found 1",
    "actor.muon.nesterov: false": "the trainer turns it off by another flag",
    "algo.advantage.estimator: grpo": "expected one of gae, reinforce, rloo",
    "algo.advantage.ddof: 2": "expected one of 0, 1, found 2",
    "algo.advantage.ddof: true": "expected one of 0, 1, found true",
    "logger.groups_path: here": "the launcher owns this flag (it is the run folder's groups/): leave it out",
    "data.input_key: true": "expected text, found true",
    "data.input_key: {a: b}": "expected text, found a mapping",
    "data.input_key: [a, b]": "expected text, found a list of 2",
    "actor.adam.betas: 0.9": "expected a list [..] of 2, each a number, found 0.9",
    "actor.adam.betas: [0.9]": "expected a list [..] of 2, each a number, found a list of 1",
    "actor.adam.betas: [0.9, x]": "expected a list [..] of 2, each a number, found the text 'x'",
    "reward.clip_range: [-.inf, 1]": "none beginning with '-' but finite numbers, found -inf",
    "ds.lora.target_modules: ['-q']": "none beginning with '-' but finite numbers, found -q",
    "algo.advantage.is_correction_threshold: []": "a list [..] of one or more",
    "ckpt.path: somewhere": "the launcher owns this flag (it is the run folder's checkpoints/): leave it out",
    "logger.wandb.key: 0123abcd": "export WANDB_API_KEY and write `logger.wandb.key: environment`",
    "actor: {adam: {lr: 1}}": "keys are flat: write actor.acpo.clamp: ...",
    "launch: {device: cpu}": "keys are flat: write launch.device: ...",
    "launch.device: tpu": "expected one of cpu, cuda, found the text 'tpu'",
    "launch.devise: cpu": "no such flag; did you mean launch.device",
    "include: 3": "expected a file or a list of files, found 3",
    "include: nowhere.yaml": "nowhere.yaml: No such file or directory",
    "include: recipe.yaml": "files include each other in a circle",
    "- a\n- b": "expected lines of the form `key: value`",
    "just text": "expected lines of the form `key: value`",
    "train.seed: [1": "not YAML: while parsing a flow sequence",
    "train.seed: " + "[" * 3000: "nested too deeply: expected `key: value` lines",
    "rollout.top_p: &a [*a]": "expected a number, found a list of 1",
    "actor.adam.betas: &a [*a, 1]": "expected a list [..] of 2, each a number, found a list of 2",
    "include: &a [*a]": "expected a file or a list of files, found a list of 1",
    "? &a [*a]\n: 1": "(key): expected the name of a flag, found a list or a mapping",
    "train.seed: 1\ntrain.seed: 2": "given twice, first at",
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.items())
def test_a_bad_line_is_refused_with_its_place_its_key_and_what_was_expected(
    tmp_path: Path, line: str, message: str
) -> None:
    recipe = write(tmp_path, f"# a comment\n\n{line}\n")
    (fault,) = faults(recipe)
    number = 2 + len(line.splitlines()) if "given twice" in message else 3
    assert fault.startswith(str(recipe) if "too deeply" in message else f"{recipe}:{number}: ")
    assert message in fault
    key = line.partition(":")[0]
    assert any(word in fault for word in (key, "(whole file)", "(syntax)", "(key)"))


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "train.seed": "train.seed: expected key=value",
        "=3": "=3: expected key=value",
        "trian.seed=3": "trian.seed: no such flag; did you mean train.seed",
        "train.seed=abc": "train.seed: expected an integer, found the text 'abc'",
        "train.seed=": "train.seed: the value is empty: `train.seed=null` leaves the flag out",
        "data.input_template= ": "data.input_template: the value is empty: `data.input_template=null` leaves the flag "
        "out, `data.input_template=\"''\"` gives it empty text",
        "train.seed=[" + "[" * 3000: "train.seed: expected an integer, found the text '[[",
        "actor.adam.betas=0.9": "actor.adam.betas: expected a list [..] of 2",
        "ckpt.load_enable=true": "ckpt.load_enable: the launcher owns this flag (`python -m slurm resume RUN` sets it)",
    }.items(),
)
def test_a_bad_setting_on_the_command_line_is_refused_as_one_in_a_file(
    tmp_path: Path, override: str, message: str
) -> None:
    (fault,) = faults(write(tmp_path, "train.seed: 1\n"), override)
    assert fault.startswith(f"command line: {message}")


def test_all_faults_are_told_at_once_each_once(tmp_path: Path) -> None:
    write(tmp_path, "train.seed: x\n", "base.yaml")
    recipe = write(tmp_path, "include: [base.yaml, base.yaml]\ntrain.bach_size: 1\n")
    told = faults(recipe, "actor.adam.lr=x")
    assert [line.split(": ")[1] for line in told] == ["train.seed", "train.bach_size", "actor.adam.lr"]


def test_a_secret_is_not_repeated_in_the_message_that_refuses_it(tmp_path: Path) -> None:
    (fault,) = faults(write(tmp_path, "logger.wandb.key: 0123abcd\n"))
    assert "0123abcd" not in fault


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*missing\.yaml: No such file"):
        read_config(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        read_config(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    {
        "train.seed: 7": 7,
        "train.seed: 1_000": 1000,
        "actor.adam.lr: 1e-3": 1e-3,
        "actor.adam.lr: 5e-7": 5e-7,
        "actor.adam.lr: 1E-6": 1e-6,
        "actor.adam.lr: .5": 0.5,
        "actor.adam.lr: 1": 1.0,
        "ckpt.max_mem: .inf": float("inf"),
        "algo.advantage.is_correction_level: off": "off",
        "data.prompt_probs: 0.50": "0.50",
        "data.prompt_split: 2024-01-01": "2024-01-01",
        "logger.wandb.run_name: 007": "007",
        "data.input_template: ''": "",
        "vllm.enforce_eager: true": True,
        "actor.adam.betas: [0.9, 1]": [0.9, 1.0],
        "ds.lora.target_modules: []": [],
        "launch.device: cpu": "cpu",
    }.items(),
)
def test_values_are_read_by_the_type_of_their_flag(tmp_path: Path, text: str, value: Any) -> None:
    config = read_config(write(tmp_path, text))
    (setting,) = config.settings.values()
    assert setting.value == value
    assert type(setting.value) is type(value)


def test_later_wins_and_the_place_of_the_winner_is_kept(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts", "train.seed: 1\ntrain.batch_size: 1\n", "a.yaml")
    write(tmp_path / "parts", "include: a.yaml\ntrain.batch_size: 2\n", "b.yaml")
    recipe = write(tmp_path, "train.num_episodes: 3\nactor.adam.lr: 1\ninclude: [parts/b.yaml]\n")
    config = read_config(recipe, ["actor.adam.lr=2e-5", "actor.adam.lr=3e-5"])
    assert {key: setting.value for key, setting in config.settings.items()} == {
        "train.seed": 1,
        "train.batch_size": 2,
        "train.num_episodes": 3,
        "actor.adam.lr": 3e-5,
    }
    assert config.settings["train.seed"].where == f"{tmp_path}/parts/a.yaml:1"
    assert config.settings["train.batch_size"].where == f"{tmp_path}/parts/b.yaml:2"
    assert config.settings["actor.adam.lr"].where == "command line"


def test_null_leaves_a_flag_out_again(tmp_path: Path) -> None:
    write(tmp_path, "train.seed: 1\neval.dataset: x.jsonl\n", "a.yaml")
    config = read_config(write(tmp_path, "include: a.yaml\neval.dataset: null\n"), ["train.seed=null"])
    assert config.settings == {}
    assert config["train.seed"] == trainer_flags()["train.seed"].default
    assert config.arguments() == []


def test_text_on_the_command_line_needs_no_second_quoting(tmp_path: Path) -> None:
    recipe = write(tmp_path, "")
    for written, meant in {
        "Q: {} A:": "Q: {} A:",
        "{}": "{}",
        "[x]": "[x]",
        "'a b'": "a b",
        "''": "",
        "a: b: c": "a: b: c",
    }.items():
        assert read_config(recipe, [f"data.input_template={written}"])["data.input_template"] == meant


def test_the_launchers_own_keys_do_not_reach_the_trainer(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "launch.device: cpu\nlaunch.prepare: tiny_task\nvllm.enforce_eager: false\n"))
    assert (config.launch.device, config.launch.prepare, config.launch.offline) == ("cpu", "tiny_task", True)
    assert config.arguments() == []


def parser_of_the_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    types = {"int": int, "float": float, "str": str}
    for flag in trainer_flags().values():
        if flag.is_switch:
            parser.add_argument(f"--{flag.name}", action=flag.action, default=flag.default)
        else:
            parser.add_argument(f"--{flag.name}", type=types[flag.type], nargs=flag.nargs, choices=flag.choices)
    return parser


def values_of(flag: Flag) -> st.SearchStrategy[Any]:
    if flag.is_switch:
        return st.just(True)
    text = st.text(string.printable + "äß✓\u2028\x85\x07", max_size=12)
    free = {"int": st.integers(), "float": st.floats(allow_nan=False), "str": text}
    one: st.SearchStrategy[Any] = st.sampled_from(list(flag.choices)) if flag.choices else free[flag.type]
    if flag.nargs is None:
        return one
    if flag.type == "float":
        one = st.floats(allow_nan=False).filter(lambda value: value != -float("inf"))
    else:
        one = one.filter(lambda value: not str(value).startswith("-"))
    low, high = {"*": (0, 3), "+": (1, 3)}.get(str(flag.nargs), (flag.nargs, flag.nargs))
    return st.lists(one, min_size=int(low), max_size=int(high))


GIVEN = [flag for flag in trainer_flags().values() if flag.name not in OWNED and flag.name != "logger.wandb.key"]


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    flags = draw(st.lists(st.sampled_from(GIVEN), unique_by=lambda flag: flag.name, max_size=12))
    return {flag.name: draw(values_of(flag)) for flag in flags}


@given(configurations())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_value_reaches_the_trainer_as_it_was_given(values: dict[str, Any]) -> None:
    config = Config("any", {key: Setting(value, "here") for key, value in values.items()})
    parsed = vars(parser_of_the_flags().parse_args(config.arguments()))
    for key, value in values.items():
        wanted = trainer_flags()[key].action != "store_false" if value is True else value
        assert parsed[key] == wanted


@given(configurations())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_dumped_configuration_reads_back_as_the_same(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    config = Config("any", {key: Setting(value, "a/file.yaml:3") for key, value in values.items()})
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(config.dump(), encoding="utf-8")
    again = read_config(path)
    assert {key: setting.value for key, setting in again.settings.items()} == values


def test_the_flags_are_well_formed() -> None:
    for flag in trainer_flags().values():
        if flag.default is not None and not flag.is_switch and flag.nargs is None:
            assert flag.read(Raw(flag.default, str(flag.default), "")) == flag.default
    assert trainer_flags().keys() >= OWNED.keys()
    assert not trainer_flags().keys() & LAUNCH_FLAGS.keys()
    assert {"eval.at_start", "eval.at_end", "logger.metrics_path"} <= known_flags().keys()


CONFIGS = ROOT / "configs"


@pytest.mark.parametrize("recipe", sorted(CONFIGS.rglob("recipes/**/*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_sound(recipe: Path) -> None:
    assert faults_between(read_config(recipe)) == []


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_configuration_says_first_what_it_is(path: Path) -> None:
    assert path.read_text().startswith("# ")


@pytest.mark.slow
def test_the_flags_on_file_are_those_of_the_installed_fork() -> None:
    assert installed_flags() == json.loads(FLAGS_FILE.read_text()), "`python -m slurm schema` rewrites slurm/flags.json"
