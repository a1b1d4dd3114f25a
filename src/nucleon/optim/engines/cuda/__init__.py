"""The step in fused kernels and a replayed graph, on CUDA."""
