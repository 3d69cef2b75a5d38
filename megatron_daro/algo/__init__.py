"""The mathematics of the losses: advantages, surrogate, difficulty weights, algorithms, corrections.

Place in the data flow: scored groups -> bins and advantages (difficulty, advantages; per token: token_columns, ppo) ->
the actor's loss (objective, with surrogate and corrections) with one coefficient per rollout -> what the algorithm
learns (difficulty_weights, histories). `algorithm` says what an algorithm is; `weighting` has the table of them, with
GRPO, its relatives and DARO, and makes one by its name; pass_rate_rules, histories and ppo have the others.

Pure torch, one process: totals over ranks are handed in. Imports only torch, what that installs (typing_extensions),
numpy, and of this package the error tree and options.py, so that another framework can take the loss alone.
"""
