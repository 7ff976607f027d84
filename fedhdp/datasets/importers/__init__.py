"""Importers: raw files of foreign formats, downloaded or local, become datasets in the data directory."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int], None]  # the step, how much of it is done, and its total (0: unknown)
