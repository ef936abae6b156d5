"""The name of every file and folder that a run writes, and the folder of what is kept between runs.

This module imports no other of hone, and every room may import it.
"""

import os
import re
from pathlib import Path

# --- in the run's folder ---
RECIPE = "recipe.json"  # the settings, as `hone run --config` reads them
CONFIG = "config.json"  # the settings with versions and changes, as `hone resume` reads them
START = "start"  # the model as the run found it: the reference, and the base under adapters
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
INVALID = "invalid.jsonl"  # why rewards were invalid
BOARD = "tensorboard"
BAD = "bad"  # the folder with the rows of skipped updates
DIVISOR = "divisor"  # by how much micro-batches shrank when memory ran out on a rank
LOCK = "lock"
REPORT = "report.html"  # what `hone report` writes
LOGS = "*.jsonl"  # a pattern that finds every log
RUN = (RECIPE, CONFIG, START, METRICS, SAMPLES, INVALID, BOARD, BAD)  # the first one marks the folder as a run's

# --- among the checkpoints ---
LATEST = "latest"  # a file that holds the name of the newest checkpoint
BEST = "best"  # a file that holds the name of the best one by save.best
STEP = "step-{:06d}"  # a checkpoint; names sort by step
STEPS = re.compile(r"step-(\d+)")  # finds the step in such a name

# --- in a checkpoint, beside the model ---
MANIFEST = "manifest.json"  # the hash of every file
STATE = "state.json"  # counters and cursors
WEIGHTS = "learner.safetensors"  # trained weights that the model's own files do not hold
MOMENTS = "optimizer.safetensors"
REFERENCE = "reference.safetensors"  # the reference, where it is no longer the model of the start
ADAPTER = "adapter"  # a folder in PEFT's format, where adapters are trained
AHEAD = "ahead.safetensors"  # rollouts that were sampled ahead of the learner
SAMPLER = "sampler.safetensors"  # the weights that are still to write rollouts


# --- kept between runs ---
def home() -> Path:
    """The folder of models and compiled files that are kept between runs: $HONE_HOME."""
    return Path(os.environ.get("HONE_HOME") or "~/.cache/hone").expanduser()
