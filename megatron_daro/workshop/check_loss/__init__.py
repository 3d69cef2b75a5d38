"""The parallel oracle: is a given loss exact under DP, CP, TP, PP, EP and micro-batches, compared with one process?

    search -> a Case (`cases`) -> CasePool (`pool`) -> each rank (`rank`): the case's numbers (`samples`), a small model
      ^        (`token_model`), Megatron's own schedule, the checked function, which gets a LossBatch and a StepInfo
      |        (`records`)
      +-- Outcome (`outcomes`): gradients, and what the loss does to each position -> a likely cause (`causes`)

The smallest case that differs is written as a script (`script`). The reference is the same function on one process with
one micro-batch in float64, so any weighting of tokens is allowed as long as it does not depend on the layout.
docs/check_loss.md has the contract of the function and a worked example; `shipped` has this package's own losses.
"""
