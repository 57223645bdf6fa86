"""Checkpoints of Hugging Face's T5, LongT5 and BART: read and written, without its libraries."""
