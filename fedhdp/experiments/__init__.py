"""Experiments: values that say what to run, the built-in ones by name, and how one is run into a directory."""

from __future__ import annotations

from fedhdp.experiments.config import Experiment, Variant, find, from_toml, to_toml
from fedhdp.experiments.presets import EXPERIMENTS, plan_experiment
from fedhdp.experiments.runner import (
    Interrupted,
    Progress,
    Watch,
    read_experiment,
    resume,
    run,
    run_or_resume,
    with_seeds,
)

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "Interrupted",
    "Progress",
    "Variant",
    "Watch",
    "find",
    "from_toml",
    "plan_experiment",
    "read_experiment",
    "resume",
    "run",
    "run_or_resume",
    "to_toml",
    "with_seeds",
]
