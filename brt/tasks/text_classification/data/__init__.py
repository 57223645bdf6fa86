"""Sentences, or pairs of them, with labels: from files to batches."""
