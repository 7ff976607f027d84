"""Size classes."""

from __future__ import annotations

from helpers import tiny_data

from fedhdp.engine.placement import size_classes


def test_size_classes():
    data = tiny_data([1, 2, 3, 9, 10, 11, 25, 26, 40, 80])
    assert size_classes(data.train, 4) == (4, 8, 12, 16, 24, 32, 48, 64, 96)
    assert size_classes(data.train, 4, several=False) == (80,)
    assert size_classes(tiny_data([7] * 5).train, 4) == (7,)
