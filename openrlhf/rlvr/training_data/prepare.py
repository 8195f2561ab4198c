"""From public data to a folder with `train.jsonl`, `validation.jsonl`, what was left out, and a manifest."""

import hashlib
import json
import math
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf.rlvr.training_data.select import Raw, Rules, Selection, select
from openrlhf.rlvr.training_data.sources import Input, InputError, cell, open_input

QUESTION_KEYS = ("problem", "question", "prompt", "input")
"""Where a benchmark's question may stand; the first that there is."""


@dataclass(frozen=True)
class Keys:
    """Where a row holds what is needed: keys that may lead through nested objects.

    Attributes:
        source: of the data source's name, or None where ``datasource`` is that name.
    """

    prompt: str
    answer: str
    source: str | None
    datasource: str | None = None


LAYOUTS = {"dapo": Keys("prompt", "reward_model.ground_truth", "data_source")}
"""Data sets by name. DAPO-Math-17k (arXiv:2503.14476) has the columns data_source, prompt (a list of one message with
role and content), ability, reward_model (style, ground_truth) and extra_info (index: differs for each repeated row)."""


@dataclass(frozen=True)
class Tokenizer:
    """Counts the tokens of a prompt; with ``chat``, of the prompt in the model's chat template."""

    name: str
    chat: bool = False


def prepare(
    output: Path, data: Input, keys: Keys, rules: Rules, benchmarks: Sequence[Input], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Make the folder, as a whole or not at all.

    Returns:
        The manifest, which is also in the folder.

    Raises:
        InputError: the output is not empty, or an input or a setting is not as it must be.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: is there already; give another folder, or remove this one")
    if rules.max_tokens is not None and tokenizer is None:
        raise InputError(
            f"the limit of {rules.max_tokens} tokens for a prompt needs the model's tokenizer: give its folder or name "
            "with --tokenizer, or do without a limit with --max-tokens 0"
        )
    used = tokenizer if rules.max_tokens is not None else None
    tokens, vocabulary = _token_counter(used) if used else (None, None)
    questions = [(question, f"{one.name}: {place}") for one in benchmarks for place, question in _questions(one)]
    rows = count_rows(data, keys)
    chosen = select(rows, rules, questions, tokens)
    manifest = {
        "input": {**data.origin, "different_rows_sha256": _hash(sorted(rows.items()))},
        "benchmarks": [{**one.origin, "overlaps": _overlaps(chosen, one)} for one in benchmarks],
        "settings": {**asdict(rules), "keys": asdict(keys), "tokenizer": asdict(used) if used else None},
        "tokenizer_vocabulary_sha256": vocabulary,
        "unicode": unicodedata.unidata_version,
        "counts": chosen.counts,
    }
    _write(output, chosen, manifest)
    return manifest


def count_rows(data: Input, keys: Keys) -> Counter[Raw]:
    """How often each prompt, answer and source occurs. Memory holds the different rows, however many there are."""
    columns = [key.split(".")[0] for key in (keys.prompt, keys.answer, keys.source) if key]
    counts: Counter[Raw] = Counter()
    for place, row in data.rows(columns):
        where = f"{data.name}: {place}"
        source = str(cell(row, keys.source, where)) if keys.source else str(keys.datasource)
        counts[_text(row, keys.prompt, where), _answer(row, keys.answer, where), source] += 1
    if not counts:
        raise InputError(f"{data.name}: holds no rows")
    return counts


def _text(row: dict[str, Any], key: str, where: str) -> str:
    """A prompt: text, or the text of a conversation that is one message of the user."""
    value = cell(row, key, where)
    if isinstance(value, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in value]
        if roles != ["user"]:
            raise InputError(f"{where}: '{key}': expected one message, with role user; its messages' roles are {roles}")
        value = cell(value[0], "content", f"{where}: '{key}'")
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: '{key}': expected the text of a prompt, not {value!r:.60}")
    return value


def _answer(row: dict[str, Any], key: str, where: str) -> str:
    value = cell(row, key, where)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number or isinstance(value, str):
        return str(value)
    raise InputError(f"{where}: '{key}': expected an answer, as text or a number, not {value!r:.60}")


def _questions(benchmark: Input) -> Iterator[tuple[str, str]]:
    for place, row in benchmark.rows(None):
        key = next((key for key in QUESTION_KEYS if key in row), None)
        if key is None:
            raise InputError(
                f"{benchmark.name}: {place}: expected a question at one of {', '.join(QUESTION_KEYS)}; "
                f"there are {', '.join(row)}"
            )
        yield place, _text(row, key, f"{benchmark.name}: {place}")


def _overlaps(chosen: Selection, benchmark: Input) -> int:
    return sum(place.startswith(f"{benchmark.name}: ") for _, place in chosen.overlaps)


def _token_counter(wanted: Tokenizer) -> tuple[Callable[[str], int], str]:
    """A function from prompts to their numbers of tokens, and a hash of the tokenizer's vocabulary."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(wanted.name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--tokenizer {wanted.name}: no tokenizer can be loaded from there: {reason:.300}") from error
    if wanted.chat and not tokenizer.chat_template:
        raise InputError(f"--tokenizer {wanted.name}: has no chat template; leave --apply-chat-template out")

    def count(prompt: str) -> int:
        if wanted.chat:
            message = {"role": "user", "content": prompt}
            prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return len(tokenizer(prompt, add_special_tokens=not wanted.chat).input_ids)

    return count, _hash(tokenizer.get_vocab())


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write(output: Path, chosen: Selection, manifest: dict[str, Any]) -> None:
    files: dict[str, list[dict[str, Any]]] = {
        "train.jsonl": [prompt.row() for prompt in chosen.train],
        "validation.jsonl": [prompt.row() for prompt in chosen.validation],
        "conflicts.jsonl": [{"input": text, "answers": answers} for text, answers in chosen.conflicts.items()],
        "overlaps.jsonl": [{**prompt.row(), "benchmark": place} for prompt, place in chosen.overlaps],
    }
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        manifest["files"] = {name: _write_lines(made / name, rows) for name, rows in files.items()}
        (made / "manifest.json").write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        made.rename(output)


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write JSON lines and return their SHA-256."""
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def open_benchmarks(names: Iterable[str]) -> list[Input]:
    """Local files of questions.

    Raises:
        InputError: one is missing.
    """
    for name in names:
        if not Path(name).is_file():
            raise InputError(f"--exclude {name}: no such file")
    return [open_input(name) for name in names]
