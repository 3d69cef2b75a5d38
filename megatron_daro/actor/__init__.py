"""The policy under training: Megatron-core model, distributed loss, train step, checkpoints, export.

The only package that imports megatron.core (and transformer_engine). One entry per concern:
device and cpu (where tensors live), parallel (process groups, seeds), layers and model (the network), weights (Hugging
Face tensors in and out), logprobs (chunked, vocabulary-parallel), loss (token sums per pass rate, reduced over ranks),
optimizer, step, checkpoint, policy (the composition that a worker process holds).
"""
