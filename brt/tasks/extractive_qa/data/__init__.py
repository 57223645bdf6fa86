"""Questions about texts that hold their answers: from files to batches of windows."""
