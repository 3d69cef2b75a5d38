"""Checkpoints between Hugging Face's format and Megatron's, in both directions, and the mean of several.

`megatron-daro convert` -> a Plan (convert/plan.py) -> `conversion`, which has worker processes (`processes`) write each
file (`jobs`) into a folder that becomes the target (`partial`), compares what it wrote (`comparison`, `forward_check`),
and leaves a card of every tensor (`card`). `average` is the mean; `model_config` finds the config.json of a Megatron
checkpoint.
"""
