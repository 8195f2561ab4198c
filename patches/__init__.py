"""The fork as a queue of structural edits on a pinned upstream release; see ``python -m patches --help``."""
