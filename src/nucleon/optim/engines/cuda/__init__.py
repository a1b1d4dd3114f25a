"""The step in fused kernels and a replayed graph, on CUDA.

Imports `engines.reference`, `optim.matrices` and the kernels of `nucleon.linalg`. Its files:

    engine                stacks that are served, reasons for others; the step of a stack
    addresses             strides of tensors, and tables of their addresses
    program               launches and their arguments: moments, direction, weights
    replay                first launched, then captured, then replayed; small stacks side by side
    kernels               moments and weights around the float16 recursion of `linalg.half`, and
                          whole steps of matrices below 64 rows
    perturbed             Pion's noise
    adamw, adamw_kernels  the parameters that are not matrices
"""
