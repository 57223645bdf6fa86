"""Export of language models to Hugging Face's format, with modeling_brt.py to run them."""
