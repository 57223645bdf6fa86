"""RoBERTa's checkpoints (model_type `roberta`) from and to our encoder."""
