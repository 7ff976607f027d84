"""Optional kernels for NVIDIA GPUs."""
