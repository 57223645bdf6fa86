"""Tokenization, preparation and batches for text classification and question answering."""
