"""Layers of the encoder-decoders T5 and BART."""
