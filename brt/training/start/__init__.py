"""What a run starts from: a checkpoint, its config, its data, a trained model or its weights."""
