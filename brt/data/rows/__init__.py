"""Rows of any kind: from tables to stores that are prepared once, and to batches of them."""
