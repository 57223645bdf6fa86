"""Text generation: sampling, greedy search and beam search."""
