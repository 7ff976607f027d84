"""Experiments: values to run, the built-in ones by name, and the runner that writes results to a directory.

the value      config.py (Experiment): components.py, file_data.py, bases.py, groups.py, variant.py, schedules.py
its file       toml.py, errors.py, sweep.py, files.py (files and runs that it names), presets.py (the built-in ones)
running it     runner.py: batch.py (variants in one simulation), start.py, extension.py, folder.py, distributed.py
its privacy    costs.py (its epsilons before it is run), audit/ (attacks on it)
"""

from __future__ import annotations

from fedhdp.experiments.batch import Interrupted, Progress, Watch
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.extension import extend
from fedhdp.experiments.folder import RunFolder
from fedhdp.experiments.presets import EXPERIMENTS, plan_experiment
from fedhdp.experiments.runner import resume, run, run_or_resume, with_seeds
from fedhdp.experiments.sweep import expand, with_options
from fedhdp.experiments.toml import find, from_toml, read_experiment, to_toml
from fedhdp.experiments.variant import Variant

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "Interrupted",
    "Progress",
    "RunFolder",
    "Variant",
    "Watch",
    "expand",
    "extend",
    "find",
    "from_toml",
    "plan_experiment",
    "read_experiment",
    "resume",
    "run",
    "run_or_resume",
    "to_toml",
    "with_options",
    "with_seeds",
]
