"""Layers of encoders that read in both directions; RoBERTa's where norms come after."""
