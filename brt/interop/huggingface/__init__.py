"""Reads and writes Hugging Face checkpoints of T5, LongT5 and BART without transformers."""
