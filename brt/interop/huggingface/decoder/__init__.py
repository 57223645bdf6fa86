"""Language models in Hugging Face's form, with the code that reads them (modeling_brt.py)."""
