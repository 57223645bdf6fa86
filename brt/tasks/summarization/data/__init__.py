"""Documents with their summaries: read, tokenized, stored, batched."""
