"""python -m openrlhf.rlvr.tiny_task --output DIR: make the model and its prompts."""

import argparse
import json
import sys
import time
from pathlib import Path

from openrlhf.rlvr.tiny_task.make import MANIFEST, Recipe, make


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the tiny task: a small warmed-up model and arithmetic prompts.")
    parser.add_argument("--output", type=Path, required=True, help="folder to make; kept if it was made from the same")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the prompts and the warm-up")
    parser.add_argument("--tied", action="store_true", help="share the input embedding with the output layer")
    arguments = parser.parse_args()
    start = time.monotonic()
    try:
        made = make(arguments.output, Recipe(arguments.seed, arguments.tied))
    except OSError as error:
        print(f"tiny task: {error}", file=sys.stderr)
        return 1
    manifest = json.loads((arguments.output / MANIFEST).read_text())
    levels = ", ".join(f"{level} {share:.0%}" for level, share in manifest["validation_accuracy"]["sampled"].items())
    how = f"made in {time.monotonic() - start:.0f} s" if made else "is there already"
    print(f"tiny task: {arguments.output} {how}; {manifest['parameters']:,} parameters; right answers: {levels}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
