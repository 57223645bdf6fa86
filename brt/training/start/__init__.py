"""Everything that a run starts from: a checkpoint, its config, its data, or other weights."""
