"""Layers of encoder-decoders: T5 normalises before each sub-layer, BART after it."""
