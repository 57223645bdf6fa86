"""Conversion of published summarization data to TensorFlow datasets on this machine."""
