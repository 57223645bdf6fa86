"""Rows of any kind, such as pairs of texts: reads tables, prepares stores, and builds batches."""
