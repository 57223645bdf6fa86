"""Layers of bidirectional encoders; with norms after the sub-layers, they are RoBERTa's."""
