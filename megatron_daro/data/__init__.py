"""Data: prompts and their cursor in front of the engine; batches, their split and their packing in front of the actor.

containers  files -> rows
formats     row -> problem and gold answers
prompts     rows -> list of Prompt and a LoadReport, exact matches with evaluation problems among it
templates   named templates: the text around a problem, and where the answer stands
tokenizer   Prompt text -> token ids
stops       what ends an answer: token ids and texts
orders      endless, resumable order of prompts: shuffled, curriculum, prioritised
batch       scored groups -> StepBatch
advantages  rewards of training, advantages of whole groups
schedule    lengths of samples -> ranks and micro-batches
packing     samples of one micro-batch -> PackedMicroBatch and back, and its context-parallel slice

Nothing is imported here, so that `megatron_daro.data.orders` loads without torch or transformers.
"""
