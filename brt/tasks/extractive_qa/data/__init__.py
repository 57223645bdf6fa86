"""Data of extractive question answering, from files to batches of windows of text."""
