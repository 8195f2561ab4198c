"""python -m openrlhf.rlvr.training_data prepare dapo --input FILE_OR_NAME --output FOLDER: make training files."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from openrlhf.rlvr.training_data.prepare import LAYOUTS, Tokenizer, open_benchmarks, prepare
from openrlhf.rlvr.training_data.select import ANSWERS, CONFLICTS, QUESTIONS, Rules
from openrlhf.rlvr.training_data.sources import Hub, InputError, open_input


def main() -> int:
    arguments = _parser().parse_args()
    try:
        report = _prepare(arguments)
    except (InputError, OSError) as error:
        print(f"training data: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


def _prepare(arguments: argparse.Namespace) -> str:
    keys = LAYOUTS[arguments.layout]
    if arguments.prompt_key:
        keys = dataclasses.replace(keys, prompt=arguments.prompt_key)
    if arguments.answer_key:
        keys = dataclasses.replace(keys, answer=arguments.answer_key)
    if arguments.datasource:
        keys = dataclasses.replace(keys, source=None, datasource=arguments.datasource)
    rules = Rules(
        answers=arguments.answers,
        question=arguments.question,
        conflicts=arguments.conflicts,
        train=arguments.train,
        validation=arguments.validation,
        max_tokens=arguments.max_tokens or None,
    )
    tokenizer = Tokenizer(arguments.tokenizer, arguments.apply_chat_template) if arguments.tokenizer else None
    data = open_input(arguments.input, Hub(arguments.config, arguments.split, arguments.revision))
    manifest = prepare(arguments.output, data, keys, rules, open_benchmarks(arguments.exclude), tokenizer)
    counts = json.dumps(manifest["counts"], indent=2).strip("{}").replace('"', "").replace(",", "")
    return f"training data: {arguments.output}{counts.rstrip()}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m openrlhf.rlvr.training_data", description=__doc__)
    command = parser.add_subparsers(required=True).add_parser("prepare", help="make training and validation files")
    add = command.add_argument
    add("layout", choices=LAYOUTS, help="the data set, that is, the columns that its rows have")
    add("--input", required=True, help="a .parquet, .json or .jsonl file, or a data set's name on the hub")
    add("--output", type=Path, required=True, help="folder to make")
    add("--config", help="of the data set on the hub")
    add("--split", default=Hub.split, help="of the data set on the hub (default: %(default)s)")
    add("--revision", help="commit of the data set on the hub")
    add("--prompt-key", metavar="KEY", help="where a prompt stands, in place of the data set's own; a.b is b inside a")
    add("--answer-key", metavar="KEY", help="where an answer stands, likewise")
    add("--datasource", metavar="NAME", help="written to every row, in place of what the rows say")
    add("--answers", choices=ANSWERS, default=Rules.answers, help="answers to keep (default: %(default)s)")
    add(
        "--question",
        choices=QUESTIONS,
        default=Rules.question,
        help="the prompt as published, without its instructions, or with the benchmarks' instruction to box the answer "
        "in their place; where no known instruction is found the text stays (default: %(default)s)",
    )
    add(
        "--conflicts",
        choices=CONFLICTS,
        default=Rules.conflicts,
        help="prompts with different answers: leave them out, or stop (default: %(default)s)",
    )
    add("--tokenizer", metavar="PATH", help="folder or name of the model whose tokens --max-tokens counts")
    add("--max-tokens", type=_count, default=Rules.max_tokens, help="of a prompt; 0: no limit (default: %(default)s)")
    add("--apply-chat-template", action="store_true", help="count the tokens of the prompt in the chat template")
    add("--train", type=_count, default=Rules.train, help="number of training prompts (default: %(default)s)")
    add("--validation", type=_count, default=Rules.validation, help="of the next prompts (default: %(default)s)")
    add("--exclude", nargs="+", default=[], metavar="FILE", help="benchmarks whose questions are left out")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("expected 0 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
