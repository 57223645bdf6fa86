"""Rows of any kind, such as pairs of texts: reading tables, prepared stores, and batches."""
