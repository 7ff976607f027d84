"""The record of a run: its schema, its files, its metrics and its tables."""
