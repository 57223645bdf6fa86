"""Conversion of those decoders for which transformers has a class (Llama, Mistral, Qwen, Gemma),
from and to Hugging Face's format.
"""
