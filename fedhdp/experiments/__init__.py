"""Experiments: values to run, the built-in ones by name, and the runner that writes results to a directory."""

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
