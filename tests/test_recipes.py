"""The papers' recipes and those of the tiny model: what they hold, and that launcher and trainer accept them."""

import argparse
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from openrlhf.rlvr import flags
from slurm import ROOT
from slurm.checks import faults, last_step
from slurm.config import Config, read_config
from slurm.inputs import CODE, absolute
from slurm.local import trainer_command
from slurm.placement import accelerators
from slurm.run_folder import RunFolder
from slurm.schema import trainer_flags

CONFIGS = ROOT / "configs"
RECIPES = sorted((CONFIGS / "recipes").rglob("*.yaml"))
OF_PAPERS = [path for path in RECIPES if path.parent != CONFIGS / "recipes"]
PAPERS = {"dynamo": "DynaMO", "reward_budgeting": "Reward budgeting", "acpo": "ACPO"}
"""Folders of recipes, and how their first lines begin."""

PROMPTS = 10_000
"""Of the papers' training files."""

SWEPT = re.compile(r"#   (\S+=\S+(?: \S+=\S+)*)")
"""A line of overrides in a recipe's comment."""

SWEEPS = [
    (path, found[1]) for path in OF_PAPERS for found in map(SWEPT.fullmatch, path.read_text().splitlines()) if found
]

IN_TINY = {"dynamic_allocation", "reward_budget", "uniform_allocation"}
"""Methods that recipes/tiny.yaml and tiny_uniform.yaml have already."""


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def own_flags() -> set[str]:
    """The flags that the fork adds to upstream's."""
    modules = {importlib.import_module(f"openrlhf.rlvr.{module}").__name__ for module in flags.DECLARING}
    groups = {cls: prefix for cls, prefix in flags._GROUPS.items() if cls.__module__ in modules}
    return {f"{prefix}.{item.name}" for cls, prefix in groups.items() for item in fields(cls)}


def upstreams_parser() -> argparse.ArgumentParser:
    """A parser of upstream's flags alone, made from the schema."""
    parser, types = argparse.ArgumentParser(), {"int": int, "float": float, "str": str}
    ours = own_flags()
    for flag in trainer_flags().values():
        if flag.name in ours:
            continue
        if flag.is_switch:
            parser.add_argument(f"--{flag.name}", action=flag.action, default=flag.default)
        else:
            options = {"nargs": flag.nargs, "choices": flag.choices, "default": flag.default}
            parser.add_argument(f"--{flag.name}", type=types[flag.type], **options)
    return parser


def accepted_by_the_trainer(config: Config, folder: Path) -> dict[str, object]:
    """What the trainer reads from the launcher's command line. Raises SystemExit with what the fork finds wrong."""
    words = trainer_command(RunFolder(folder), absolute(config))
    return vars(flags.parse(upstreams_parser(), words[3:]))


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_the_trainer_accepts_every_recipe_as_the_launcher_passes_it_on(recipe: Path, tmp_path: Path) -> None:
    config = absolute(read_config(recipe))
    given = accepted_by_the_trainer(config, tmp_path)
    for key, setting in config.settings.items():
        assert key.startswith("launch.") != (key in given)
        if key in given:
            assert given[key] == setting.value
    for key in CODE:
        assert config[key] is None or Path(config[key]).is_file()


@pytest.mark.parametrize("recipe", OF_PAPERS, ids=name)
def test_a_papers_recipe_fills_one_node_and_its_last_step_too(recipe: Path) -> None:
    config = read_config(recipe)
    assert sum(accelerators(config).values()) == 8
    assert list(last_step(config, min(PROMPTS, config["data.max_samples"]))) == []
    assert recipe.read_text().startswith(f"# {PAPERS[recipe.parent.name]}, ")
    assert any(recipe.stem.startswith(f"{path.stem}-") for path in (CONFIGS / "models").glob("*.yaml"))


@pytest.mark.parametrize(("recipe", "overrides"), SWEEPS, ids=[words for _, words in SWEEPS])
def test_every_override_that_a_recipe_names_is_sound(recipe: Path, overrides: str, tmp_path: Path) -> None:
    config = read_config(recipe, overrides.split())
    assert faults(config) == []
    accepted_by_the_trainer(config, tmp_path)


def test_no_two_recipes_of_a_paper_are_the_same_run() -> None:
    seen: dict[tuple[str, ...], Path] = {}
    for path in OF_PAPERS:
        config = read_config(path)
        run = (path.parent.name, *config.arguments())
        assert run not in seen, f"{name(path)} is {name(seen[run])}"
        seen[run] = path


def test_every_method_has_a_recipe_of_the_tiny_model_with_more_than_one_update() -> None:
    for method in {path.stem for path in (CONFIGS / "methods").glob("*.yaml")} - IN_TINY:
        config = read_config(CONFIGS / "recipes" / f"tiny_{method}.yaml")
        assert config["rollout.batch_size"] * config["rollout.n_samples_per_prompt"] == 2 * config["train.batch_size"]
        assert config.launch.device == "cpu"


def test_a_method_holds_nothing_but_flags_of_algorithms() -> None:
    for path in (CONFIGS / "methods").glob("*.yaml"):
        keys = read_config(path).settings.keys()
        assert {key.split(".")[0] for key in keys} <= {"actor", "algo", "reward"}
        assert not {"actor.adam.lr", "actor.model_name_or_path", "reward.remote_url"} & keys
