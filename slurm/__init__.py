"""Runs recipes: reads and checks a configuration, starts the trainer, watches it, reports on it.

Light on purpose: everything here but the plot runs on a log-in node that has neither torch nor ray nor vllm.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root; relative paths in configurations are meant from here, wherever a command is typed."""
