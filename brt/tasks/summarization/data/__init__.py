"""Data of summarization: documents with their summaries, from tables to batches."""
