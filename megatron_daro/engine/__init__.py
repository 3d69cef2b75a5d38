"""Rollout engines behind one Protocol. `embedded` runs transformers in this process; no Ray, no Megatron."""
