"""Makes patients.csv: scikit-learn's breast-cancer data among 20 hospitals, `python examples/hospitals/make_data.py`.

The data is the Breast Cancer Wisconsin (Diagnostic) data set by W. Wolberg, O. Mangasarian, N. Street and W. Street (UCI
Machine Learning Repository, 1993, doi.org/10.24432/C5DW2B), licensed under CC BY 4.0. Hospitals, their sizes, their mix of
diagnoses and their levels of privacy are made up here: the original has none.
"""

import csv
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

LEVELS = ["open"] * 4 + ["mild"] * 8 + ["strict"] * 8

rng = np.random.default_rng(34)
source = load_breast_cancer()
columns = [name.replace(" ", "_") for name in source.feature_names]
hospitals = [f"H{number:02}" for number in range(1, len(LEVELS) + 1)]
sizes = rng.dirichlet(np.full(len(LEVELS), 2.0))  # a few large hospitals, many small ones
mixes = rng.beta(4, 4, len(LEVELS))  # how often a hospital sees malignant tumours, which are class 0
levels = rng.permutation(LEVELS)

rows = []
for x, y in zip(source.data, source.target, strict=True):
    share = sizes * (mixes if y == 0 else 1 - mixes)
    number = rng.choice(len(hospitals), p=share / share.sum())
    rows.append([hospitals[number], levels[number], *(f"{value:g}" for value in x), source.target_names[y]])
with open(Path(__file__).parent / "patients.csv", "w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["hospital", "privacy", *columns, "diagnosis"])
    writer.writerows(sorted(rows, key=lambda row: row[0]))
