"""`python -m slurm`: submit, resume, report, schema."""

import argparse
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from slurm import ROOT, local
from slurm.checks import faults, last_step
from slurm.comparison import write_comparison
from slurm.config import Config, read_config, shown
from slurm.inputs import Inputs, absolute, look_at_inputs
from slurm.placement import accelerators
from slurm.problems import ConfigError, UserError
from slurm.processes import processes_of
from slurm.progress import Status, Watch, duration
from slurm.provenance import changes, gather
from slurm.report import as_markdown, validation_rows, write_report
from slurm.run_folder import Attempt, RunFolder, create_run, open_run, read_json
from slurm.schema import FLAGS_FILE, regenerate

BAD_REQUEST = 2
"""Exit status when nothing was started; otherwise it is the trainer's, or 128 + the signal that ended the run."""


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    try:
        return int(arguments.command(arguments))
    except ConfigError as error:
        _complain(f"{len(error.problems)} fault{'s' * (len(error.problems) > 1)}, nothing was started:\n{error}")
    except UserError as error:
        _complain(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # what was shown went into a pipe whose reader has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # no space, no permission: the file says it all
        _complain(f"{error.filename}: {error.strerror}")
    return BAD_REQUEST


def submit(arguments: argparse.Namespace) -> int:
    """Check a recipe, make its run folder, train, report."""
    console = Console(quiet=arguments.quiet)
    config = absolute(read_config(arguments.recipe, arguments.overrides))
    if arguments.name and not re.fullmatch(r"\w[\w.-]*", arguments.name):
        raise UserError(f"--name {arguments.name}: expected letters, digits, '.', '_' and '-'")
    preparation = local.preparation_of(config)
    inputs = _checked(config, preparation.folder if preparation else None)
    local.check_devices(config, local.visible_gpus())
    if arguments.dry_run:
        _show_plan(config, arguments.runs, preparation, inputs.warnings)
        return 0
    if preparation:
        console.print(f"preparing {shown(preparation.folder)}, which is kept for later runs", highlight=False)
        began = time.monotonic()
        if status := local.prepare(config, preparation):
            return status
        console.print(f"prepared in {duration(time.monotonic() - began)}", highlight=False)
        inputs = _checked(config)
    for warning in inputs.warnings:
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True)
    run = create_run(arguments.runs, arguments.name or config.name, config, sys.argv, gather(inputs))
    return _train(run, config, inputs, console)


def resume(arguments: argparse.Namespace) -> int:
    """Go on from the newest checkpoint of a run, as a new attempt in its folder."""
    run = open_run(arguments.run)
    config = run.read_config()
    inputs = _checked(config)
    if run.attempts and run.attempts[-1].record.get("outcome") == "finished":
        raise UserError(f"{shown(run.root)} is finished; there is nothing to resume")
    if alive := processes_of(run.root):
        raise UserError(f"{shown(run.root)} is still running: processes {', '.join(str(one.pid) for one in alive)}")
    if not run.has_checkpoint:
        raise UserError(f"{shown(run.checkpoints)} holds no checkpoint; `ckpt.save_steps: N` saves one every N steps")
    changed = changes(read_json(run.provenance), gather(inputs)) if run.provenance.exists() else []
    if changed and not arguments.allow_changes:
        told = "\n".join(changed)
        raise UserError(
            f"this has changed since the run began, and its numbers may change with it:\n{told}\n"
            "restore it, or resume with --allow-changes"
        )
    return _train(run, config, inputs, Console(quiet=arguments.quiet), resume=True, changed=changed)


def report(arguments: argparse.Namespace) -> int:
    """Summarize a run and draw its curves, or compare several: validation accuracy against the samples that it took."""
    folders = [Path(word) for word in arguments.runs]
    if len(folders) == 1:
        if arguments.output:
            raise UserError(
                "--output is for a comparison of several runs; the report of one is in its folder's report/"
            )
        _show_report(open_run(folders[0]), Console())
        return 0
    text, left_out = write_comparison(folders, arguments.output)
    for name, reason in left_out.items():
        _complain(f"warning: {name} is left out: {reason}")
    _show_text(text, Console())
    return 0


def schema(arguments: argparse.Namespace) -> int:
    """Rewrite slurm/flags.json from the installed fork."""
    changed = regenerate()
    print(f"{shown(FLAGS_FILE)}: {', '.join(changed) if changed else 'nothing changed'}")
    return 0


def _train(
    run: RunFolder,
    config: Config,
    inputs: Inputs,
    console: Console,
    resume: bool = False,
    changed: Sequence[str] = (),
) -> int:
    attempt: Attempt = run.new_attempt()
    if changed:
        attempt.note(changed=list(changed))
    console.print(f"run folder {shown(run.root)}", highlight=False, soft_wrap=True)
    status = Status(inputs.steps(config), validation_rows(run))
    watch = Watch(run, attempt, status, console)
    try:
        code = local.execute(run, config, attempt, local.trainer_command(run, config, resume), watch.tick)
    finally:
        watch.close()
    record = attempt.record
    if record["outcome"] == "failed":
        _complain("\n".join(("the trainer failed:", *record["reason"], f"log: {shown(attempt.log)}")))
    elif record["outcome"] == "stopped":
        further = f"; `python -m slurm resume {shown(run.root)}` goes on from the newest checkpoint"
        _complain(f"stopped{further if run.has_checkpoint else ', before the first checkpoint'}")
    if record["not_ended"]:
        _complain(f"these processes would not end: {record['not_ended']}")
    if record["outcome"] == "finished":
        _show_report(run, console)
    return code


def _checked(config: Config, to_be_made: Path | None = None) -> Inputs:
    inputs = look_at_inputs(config, to_be_made)
    problems = [*faults(config), *inputs.problems]
    if problems := problems or [*last_step(config, inputs.rows(config, "data.prompt_dataset"))]:
        raise ConfigError(problems)
    return inputs


def _show_report(run: RunFolder, console: Console) -> None:
    _show_text(as_markdown(write_report(run)), console)


def _show_text(text: str, console: Console) -> None:
    console.print(Markdown(text) if console.is_terminal else text, soft_wrap=not console.is_terminal, markup=False)


def _show_plan(config: Config, runs: Path, preparation: local.Preparation | None, warnings: Sequence[str]) -> None:
    run = RunFolder(runs.resolve() / f"{config.name}-TIME")
    print(config.dump())
    if preparation:
        print(f"# first: {preparation.module} makes {shown(preparation.folder)}; its files are checked then")
    print(f"# {config.launch.device}: " + ", ".join(f"{part} {count}" for part, count in accelerators(config).items()))
    for warning in warnings:
        print(f"# warning: {warning}")
    print(" \\\n    ".join(map(shlex.quote, local.trainer_command(run, config))))


def _complain(text: str) -> None:
    Console(stderr=True).print(text, style="red", highlight=False, markup=False, soft_wrap=True)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    # argparse gives up on words that follow an option, as in `submit RECIPE --dry-run key=value`.
    for word in rest:
        if word.startswith("-") or not hasattr(arguments, "more"):
            parser.error(f"not understood: {word}")
        getattr(arguments, arguments.more).append(word)
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m slurm", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("submit", help=submit.__doc__)
    one.set_defaults(command=submit, more="overrides")
    one.add_argument("recipe", type=Path, help="a YAML file, such as configs/recipes/tiny.yaml")
    one.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the recipe's")
    one.add_argument("--cluster", type=_cluster, default="local", help="where to run; this version knows `local`")
    one.add_argument("--runs", type=Path, default=ROOT / "runs", help="where run folders are made")
    one.add_argument("--name", help="the run folder's name, followed by the time; default: the recipe's")
    one.add_argument("--dry-run", action="store_true", help="check, show what would run, start nothing")
    one.add_argument("--quiet", action="store_true", help="show faults only")
    one = commands.add_parser("resume", help=resume.__doc__)
    one.set_defaults(command=resume)
    one.add_argument("run", type=Path, help="a run folder, such as runs/latest")
    one.add_argument(
        "--allow-changes", action="store_true", help="resume although versions or data changed; the attempt records it"
    )
    one.add_argument("--quiet", action="store_true", help="show faults only")
    one = commands.add_parser("report", help=report.__doc__)
    one.set_defaults(command=report, more="runs")
    one.add_argument("runs", nargs="+", metavar="run", help="a run folder, such as runs/latest; several are compared")
    one.add_argument("--output", type=Path, help="new folder for a comparison; default: next to the first run")
    one = commands.add_parser("schema", help=schema.__doc__)
    one.set_defaults(command=schema)
    return parser


def _cluster(name: str) -> str:
    if name != "local":
        raise argparse.ArgumentTypeError(f"'{name}': this version runs recipes on this machine only; write local")
    return name


if __name__ == "__main__":
    sys.exit(main())
