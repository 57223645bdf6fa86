"""Summarisation data as its makers publish it, written as TensorFlow datasets on this machine."""
