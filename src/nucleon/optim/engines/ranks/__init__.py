"""Steps of several processes: collect gradients, step by another engine, distribute.

"local": every rank computes every matrix. Nothing is sent for plain tensors, which DDP keeps alike;
the gradients of DTensors are gathered to every rank (`gathered`).
"owner": each parameter has one rank that keeps its state and computes its direction. Shards of its
gradient are sent there, and the direction is sent back, to each rank what it holds (`owners`).
"""
