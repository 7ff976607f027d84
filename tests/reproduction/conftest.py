"""Fixtures of the reproduction's tests."""

import pytest


@pytest.fixture(autouse=True)
def _empty_data_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHDP_DATA", str(tmp_path / "no-data"))
