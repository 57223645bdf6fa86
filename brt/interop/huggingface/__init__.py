"""Reads and writes Hugging Face checkpoints without transformers. The modules of this folder are
for T5, LongT5, BART and RoBERTa, and its sub-packages are for decoders.
"""
