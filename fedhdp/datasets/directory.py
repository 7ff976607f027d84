"""The data directory: where it is, which sources are known, which files each is made from and where those come from.

``FEDHDP_DATA`` names the directory; without it, it is ``fedhdp`` in the user's cache. Each source that was imported is
one folder of arrays in it (see `stored`); nothing else needs to be kept.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

VARIABLE = "FEDHDP_DATA"
_MNIST_MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)


class File(NamedTuple):
    """A file that a source is made from."""

    name: str
    urls: tuple[str, ...] = ()  # the same file at each; empty: it is not offered for download
    sha256: str | None = None  # of the file as it is downloaded
    content_sha256: str | None = None  # of what is inside its compression, however it was compressed


class Source(NamedTuple):
    """Data that can be in the directory."""

    name: str
    about: str
    origin: str
    files: tuple[File, ...]

    @property
    def downloads(self) -> bool:
        """Whether it can be downloaded."""
        return all(file.urls for file in self.files)


def _mnist(name: str, sha256: str, content_sha256: str) -> File:
    return File(f"{name}.gz", tuple(f"{mirror}{name}.gz" for mirror in _MNIST_MIRRORS), sha256, content_sha256)


# MNIST: the sums of the contents were computed; those of the archives are as many projects publish them.
# TFF: as published by a third party; nobody has checked it for this project. A file that has another sum can still be
# had with `--sha256`, or fetched by other means and imported.
SOURCES = {
    source.name: source
    for source in (
        Source(
            "mnist",
            "60,000 train and 10,000 test images of digits",
            "Y. LeCun, C. Cortes, C. Burges; public mirrors",
            (
                _mnist(
                    "train-images-idx3-ubyte",
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                ),
                _mnist(
                    "train-labels-idx1-ubyte",
                    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                ),
                _mnist(
                    "t10k-images-idx3-ubyte",
                    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                ),
                _mnist(
                    "t10k-labels-idx1-ubyte",
                    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
            ),
        ),
        Source(
            "mnist-writers",
            "who wrote each image of MNIST: 836 writers",
            "an npz with the arrays train and test, in MNIST's order; not offered for download",
            (File("writers.npz"),),
        ),
        Source(
            "femnist-330",
            "54,633 digits and letters of 330 writers",
            "an npz with the arrays images, labels, client, is_test, client_ids; not offered for download",
            (File("femnist_330.npz"),),
        ),
        Source(
            "emnist-tff",
            "TFF's federated EMNIST: 3,383 clients with digits, 3,400 with digits and letters",
            "TensorFlow Federated; 171 MB to download, 4.7 GB while it is unpacked, 0.9 GB kept",
            (
                File(
                    "emnist_all.sqlite.lzma",
                    ("https://storage.googleapis.com/tff-datasets-public/emnist_all.sqlite.lzma",),
                    "c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48",
                ),
            ),
        ),
        Source(
            "femnist-leaf",
            "LEAF's FEMNIST: digits and letters of about 3,600 writers",
            "made by LEAF's own scripts (github.com/TalwalkarLab/leaf, data/femnist); import its folder of JSON",
            (File("train/*.json and test/*.json, or all_data/*.json"),),
        ),
    )
}


def data_directory() -> Path:
    """Where data is kept."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path is to be ignored.
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "fedhdp"


def source(name: str) -> Source:
    """A source by its name."""
    if name not in SOURCES:
        raise ValueError(f"there is no source {name!r}; there are {', '.join(SOURCES)}")
    return SOURCES[name]
