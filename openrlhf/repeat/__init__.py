"""A seeded run repeats bit for bit, and a resumed run equals the uninterrupted one.

Three things decide a run's samples: the order of the prompts, the noise of each sample, and the order in which
samples reach the update. Each is a function of ``--train.seed`` and of numbers that a checkpoint carries, never of
which process was faster.
"""
