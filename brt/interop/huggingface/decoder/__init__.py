"""Export of language models for which transformers has no class to Hugging Face's format.

An exported directory contains PyTorch code that runs the model: modeling_brt.py, decoder_brt.py and
layers_brt.py.
"""
