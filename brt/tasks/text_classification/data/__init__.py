"""Data of text classification and regression: from files to batches."""
