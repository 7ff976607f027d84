"""The record of a run: its schema, its files, its metrics and its tables.

values         schema.py, metrics.py
on disk        store.py, files.py, provenance.py; loggers.py: TensorBoard, MLflow, Weights & Biases
read back      stored.py, models.py; disclosure.py: what may be published
shown          tables.py, comparison.py, headline.py; series.py, figures.py, palette.py
"""

from fedhdp.results.metrics import group_rows, half_interval
from fedhdp.results.models import PersonalModels, load_model, load_personal
from fedhdp.results.schema import (
    GroupResult,
    MetricInfo,
    MetricRow,
    Summary,
    VariantResult,
    account_groups,
    attach_metrics,
)
from fedhdp.results.store import (
    EXPERIMENT_FILE,
    SUMMARY_FILE,
    DamagedRunError,
    RunDirectory,
    VariantDirectory,
    atomic_write,
    encode_json,
    read_arrays,
    read_value,
    slug,
    write_arrays,
    write_value,
)
from fedhdp.results.tables import footnotes, format_table, table_cells

__all__ = [
    "EXPERIMENT_FILE",
    "SUMMARY_FILE",
    "DamagedRunError",
    "GroupResult",
    "MetricInfo",
    "MetricRow",
    "PersonalModels",
    "RunDirectory",
    "Summary",
    "VariantDirectory",
    "VariantResult",
    "account_groups",
    "atomic_write",
    "attach_metrics",
    "encode_json",
    "footnotes",
    "format_table",
    "group_rows",
    "half_interval",
    "load_model",
    "load_personal",
    "read_arrays",
    "read_value",
    "slug",
    "table_cells",
    "write_arrays",
    "write_value",
]
