"""Data: prompts and their cursor in front of the engine; batches, their split and their packing in front of the actor.

containers, formats  files -> rows -> problem and gold answers of each
prompts              rows -> list of Prompt and a LoadReport
contamination        exact matches between training and evaluation problems
tokenizer, template  Prompt text -> token ids
cursor               endless, resumable order of prompts
pass_rates, orders   stored pass rates of a file; orders by difficulty: curriculum, prioritised
batch                scored groups -> TrainBatch
schedule             lengths of a TrainBatch -> ranks and micro-batches
packing              samples of one micro-batch -> PackedMicroBatch and back, and its context-parallel slice

Nothing is imported here, so that `megatron_daro.data.orders` loads without torch or transformers.
"""
