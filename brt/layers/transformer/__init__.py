"""Layers that encoders and encoder-decoders share. Settings distinguish the model families."""
