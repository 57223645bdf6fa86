"""Layers of encoder-decoders: T5's with norms before, BART's with norms after."""
