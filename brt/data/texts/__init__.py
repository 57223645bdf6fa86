"""Tokenization, stores and batches that the tasks on sentences and questions share."""
