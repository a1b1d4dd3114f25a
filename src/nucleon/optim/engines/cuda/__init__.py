"""The step in fused kernels and a replayed graph, on CUDA.

Its files in the order of a step:

    engine                what is served, and why not; gradients as the kernels read them
    graphs, capture       the step of a stack: launched first, then captured, then replayed
    launch                the launches one by one: moments, direction, weights
    kernels               moments and weights around the float16 recursion of `linalg.half`
    small, perturbed      matrices below 64 rows; Pion's noise
    job, layout           what the kernels must know of a stack: numbers and strides
    pointers, fill        where its tensors lie: tables of addresses
    lanes                 small stacks side by side, on streams of their own
    adamw, adamw_kernels  the parameters that are not matrices
"""
