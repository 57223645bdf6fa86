"""Rows of any kind: tables, stores that are prepared once, and batches."""
