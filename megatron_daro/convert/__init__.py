"""Hugging Face checkpoints <-> Megatron-core parameters: names, slices, files.

Place in the data flow: HF checkpoint -> `HFCheckpoint` -> `read_shard` -> actor; actor -> `merge` -> engines, or
`write_hf_checkpoint`. workshop/convert carries out a `Plan`.
"""
