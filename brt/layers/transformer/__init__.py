"""Layers that encoders and encoder-decoders share.

The settings in `Block` distinguish the model families RoBERTa, T5 and BART.
"""
