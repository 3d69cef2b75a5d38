"""`megatron-daro convert`: checkpoints of Hugging Face and of Megatron into each other, by the tables of `convert/`.

Place in the data flow: a checkpoint -> `plan` (megatron_daro.convert.plan) -> `conversion` with `jobs` in worker
processes -> a verified checkpoint with its card.
"""
