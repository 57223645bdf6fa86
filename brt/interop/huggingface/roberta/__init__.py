"""Import and export of RoBERTa checkpoints (model_type `roberta`)."""
