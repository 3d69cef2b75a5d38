"""The policy under training: Megatron-core model, distributed loss, train step, checkpoints, export.

A worker process (runtime/train_worker.py) holds a `policy.MegatronPolicy`, the composition of the rest:

  Megatron      megatron (imports it, for all of actor/), device and cpu (where this process computes), compat (gaps)
  process       parallel (process groups, seeds), communicators (their GPU memory), settings (plain values of the run,
                without Megatron), translation and objective_settings (the configuration for Megatron, and for the loss)
  model         layers, linear_attention, model, lora (adapters), precision (fp8), weights (Hugging Face tensors in and
                out), building (what building a policy and a critic share)
  forward       forward (micro-batches through the pipeline), logprobs and logprob_kernels (chunked, vocabulary-
                parallel), routing_replay (experts as the engine chose them)
  step          advantages -> loss (token sums per pass rate) -> step -> optimizer; critic and critic_metrics;
                reductions (what is summed over which ranks)
  state         checkpoint on sharded_state, optimizer_shards and shard_file; snapshot in the slots of double_buffer;
                host_memory (off the device and back)

Outside actor/, megatron.core is imported by workshop/check_loss, workshop/convert and, inside functions, by plugins/;
transformer_engine by no other code.
"""
