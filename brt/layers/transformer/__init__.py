"""Layers that encoders and encoder-decoders share; small settings tell the families apart."""
