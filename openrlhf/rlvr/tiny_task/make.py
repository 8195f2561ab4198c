"""The tiny task's folder: made as a whole or not at all, and only if it is not there already."""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from filelock import FileLock

from openrlhf.rlvr.tiny_task import problems, warm_up
from openrlhf.rlvr.tiny_task.accuracy import accuracy
from openrlhf.rlvr.tiny_task.model import make_model, make_tokenizer, save

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Recipe:
    """What a folder is made from. `tied` shares the model's input embedding with its output layer."""

    seed: int = 0
    tied: bool = False
    warm_up_steps: int = warm_up.STEPS


def make(output: Path, recipe: Recipe) -> bool:
    """Make `model/`, `train.jsonl`, `validation.jsonl` and `manifest.json`; False if they were there already.

    Raises:
        FileExistsError: the folder holds something else.
    """
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(output.with_name(f".{output.name}.lock")):
        if is_made(output, recipe):
            return False
        if output.exists() and any(output.iterdir()) and not (output / MANIFEST).is_file():
            raise FileExistsError(f"{output} is not empty and no tiny task (it has no {MANIFEST}); give another folder")
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _fill(made, recipe)
            if output.exists():
                output.rename(Path(scratch) / "replaced")
            made.rename(output)
    return True


def is_made(output: Path, recipe: Recipe) -> bool:
    """Whether the folder holds what this recipe and this code make, unchanged."""
    try:
        manifest = json.loads((output / MANIFEST).read_text())
        origin = {"recipe": manifest["recipe"], "made_by": manifest["made_by"]}
        return origin == _origin(recipe) and manifest["files"] == _hashes(output)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _fill(folder: Path, recipe: Recipe) -> None:
    split = problems.split(recipe.seed)
    prompts = problems.training_prompts(split.known, recipe.seed)
    _write_rows(folder / "train.jsonl", prompts)
    _write_rows(folder / "validation.jsonl", split.validation)
    tokenizer = make_tokenizer()
    with warm_up.repeatable(recipe.seed):
        model = make_model(tokenizer, recipe.tied)
        warm_up.warm_up(model, tokenizer, split.known, recipe.seed, recipe.warm_up_steps)
        save(model, tokenizer, folder / "model")
        model.bfloat16().float()  # measured with the weights that were saved
        rows = [problem.row() for problem in split.validation]
        measured = {
            "sampled": accuracy(model, tokenizer, rows, samples=2),
            "greedy": accuracy(model, tokenizer, rows, temperature=0),
        }
    manifest = {
        **_origin(recipe),
        "parameters": model.num_parameters(),
        "prompts": {"train": _counts(prompts), "validation": _counts(split.validation)},
        "validation_accuracy": measured,
        "files": _hashes(folder),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _origin(recipe: Recipe) -> dict[str, Any]:
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    versions = {module.__name__: module.__version__ for module in (tokenizers, torch, transformers)}
    return {"recipe": asdict(recipe), "made_by": {"code": code.hexdigest(), **versions}}


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _write_rows(path: Path, rows: Iterable[problems.Problem]) -> None:
    path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in rows))


def _counts(rows: Iterable[problems.Problem]) -> dict[str, int]:
    counts = Counter(problem.level for problem in rows)
    return {"all": counts.total(), **counts}
