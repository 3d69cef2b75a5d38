"""Plans a model's layout on a cluster before a GPU-hour is spent: what fits, what each part of the memory takes, what
a step costs. docs/plan.md says how this is computed.

Place in the data flow: a resolved configuration and a GPU's numbers -> search -> choices. Imports no Ray and no
Megatron, and torch only for `--sync` (shard_sync.py), so that it runs wherever people write recipes.
"""
