"""The step in fused kernels and a replayed graph, on CUDA.

Its files in the order of a step:

    engine                what is served, and why not; the step of a stack
    addresses             where its tensors lie: strides, and tables of addresses
    program               what is launched, with which arguments: moments, direction, weights
    replay                launched first, then captured, then replayed; small stacks side by side
    kernels               moments and weights around the float16 recursion of `linalg.half`
    small, perturbed      matrices below 64 rows; Pion's noise
    adamw, adamw_kernels  the parameters that are not matrices
"""
