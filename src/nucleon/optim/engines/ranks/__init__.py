"""Steps of several processes: collect gradients, step by another engine, distribute.

"local": every rank computes every matrix. Plain tensors need no communication, since DDP keeps them
equal; the gradients of DTensors are gathered to every rank (`gathered`).
"owner": one rank keeps the state of a parameter and computes its direction. Shards of the gradient
are sent to the owner, and shards of the direction are sent back (`owners`).

Imports `engines.reference`, `optim.matrices` and torch's collectives, no kernels.
"""
