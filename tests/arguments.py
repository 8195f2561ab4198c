"""Parsed arguments of the trainer, for tests of what reads them."""

import argparse
import json
from typing import Any

from openrlhf.utils.config import hierarchize
from slurm.schema import FLAGS_FILE


def arguments(**flags: Any) -> Any:
    """All flags at their defaults but the given ones, dots written as two underscores, in upstream's nested form."""
    values = {name: entry["default"] for name, entry in json.loads(FLAGS_FILE.read_text()).items()}
    given = {name.replace("__", "."): value for name, value in flags.items()}
    assert given.keys() <= values.keys(), given.keys() - values.keys()
    return hierarchize(argparse.Namespace(**(values | given)))
