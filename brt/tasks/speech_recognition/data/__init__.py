"""Utterances: features with transcripts, from files to batches."""
