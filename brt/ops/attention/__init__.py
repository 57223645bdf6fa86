"""The attention kernels for TPUs and GPUs, which all kinds of attention share."""
