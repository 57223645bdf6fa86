"""What a run would need and how fast it would be, by the compilers of machines elsewhere."""
