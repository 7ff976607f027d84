"""The datasets that can be imported: their raw files, where to download them, and their checksums."""

from __future__ import annotations

import msgspec

from fedhdp.errors import require

_MNIST_MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)


class RawFile(msgspec.Struct, frozen=True):
    """A file that a dataset is made from."""

    name: str
    urls: tuple[str, ...] = ()  # mirrors of the same file; empty if it cannot be downloaded
    sha256: str | None = None  # of the downloaded file
    content_sha256: str | None = None  # of the decompressed content


class DatasetInfo(msgspec.Struct, frozen=True):
    """A dataset that the data directory can hold."""

    name: str
    description: str
    origin: str
    files: tuple[RawFile, ...]

    @property
    def downloadable(self) -> bool:
        """Whether all of its files can be downloaded."""
        return all(file.urls for file in self.files)


def _mnist_file(name: str, sha256: str, content_sha256: str) -> RawFile:
    return RawFile(f"{name}.gz", tuple(f"{mirror}{name}.gz" for mirror in _MNIST_MIRRORS), sha256, content_sha256)


_CATALOG = (
    DatasetInfo(
        "mnist",
        "60,000 train and 10,000 test images of digits",
        "Y. LeCun, C. Cortes, C. Burges; public mirrors",
        (
            # The archives' checksums are those that many projects publish; the contents' were computed.
            _mnist_file(
                "train-images-idx3-ubyte",
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            _mnist_file(
                "train-labels-idx1-ubyte",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            _mnist_file(
                "t10k-images-idx3-ubyte",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            _mnist_file(
                "t10k-labels-idx1-ubyte",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
    ),
    DatasetInfo(
        "mnist-writers",
        "the writer of each image of MNIST: 836 writers",
        "an npz with the arrays train and test, in MNIST's order; no download",
        (RawFile("writers.npz"),),
    ),
    DatasetInfo(
        "femnist-330",
        "54,633 digits and letters of 330 writers",
        "an npz with the arrays images, labels, client, is_test, client_ids; no download",
        (RawFile("femnist_330.npz"),),
    ),
    DatasetInfo(
        "emnist-tff",
        "TFF's federated EMNIST: 3,383 clients with digits, 3,400 with digits and letters",
        "TensorFlow Federated; 171 MB to download, 4.7 GB while it is unpacked, 0.9 GB on disk",
        (
            RawFile(
                "emnist_all.sqlite.lzma",
                ("https://storage.googleapis.com/tff-datasets-public/emnist_all.sqlite.lzma",),
                # Published by a third party, unverified. A file with another checksum can be fetched with `--sha256`.
                "c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48",
            ),
        ),
    ),
    DatasetInfo(
        "femnist-leaf",
        "LEAF's FEMNIST: digits and letters of about 3,600 writers",
        "LEAF's scripts (github.com/TalwalkarLab/leaf, data/femnist); import their folder of JSON",
        (RawFile("train/*.json and test/*.json, or all_data/*.json"),),
    ),
)
DATASETS = {dataset.name: dataset for dataset in _CATALOG}


def dataset_info(name: str) -> DatasetInfo:
    """The dataset of this name.

    Raises:
        InvalidValueError: If there is no such dataset.
    """
    require(name in DATASETS, "dataset", name, f"one of {', '.join(DATASETS)}")
    return DATASETS[name]


def how_to_get(name: str) -> str:
    """The commands that bring a dataset into the data directory."""
    download = f"`fedhdp data download {name}` or " if DATASETS[name].downloadable else ""
    return f"{download}`fedhdp data import PATH...`"
