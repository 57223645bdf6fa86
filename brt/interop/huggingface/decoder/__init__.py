"""Export of language models to Hugging Face's format, if transformers has no class for them.

An exported directory contains PyTorch code that runs the model: modeling_brt.py, decoder_brt.py and
layers_brt.py.
"""
