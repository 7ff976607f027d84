"""Experiments: values that say what to run, the built-in ones by name, and how one is run into a folder."""

from collections.abc import Callable

from fedhdp.experiments.config import Experiment
from fedhdp.experiments.presets import by_writer, letters, quickstart, skewed, three_levels

EXPERIMENTS: dict[str, Callable[[], Experiment]] = {
    "quickstart": quickstart,
    "skewed": skewed,
    "by-writer": by_writer,
    "three-levels": three_levels,
    "letters": letters,
}
