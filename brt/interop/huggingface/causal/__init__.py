"""Conversion of decoders (Llama, Mistral, Qwen, Gemma) from and to Hugging Face's format, for which
transformers has classes.
"""
