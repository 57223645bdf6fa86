"""Data of speech recognition: from files of features or sound to batches."""
