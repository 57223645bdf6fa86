"""Converts the published files of summarization datasets to TensorFlow datasets on this machine."""
