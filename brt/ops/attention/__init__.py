"""The attention kernels: one body for each pass and backend, for all kinds of attention."""
