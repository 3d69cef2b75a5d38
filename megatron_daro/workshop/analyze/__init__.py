"""What DARO would do with rollouts that somebody recorded: no model, no training.

Place in the data flow: files of this package, verl or slime (or any JSONL or Parquet with named columns) -> one row per
rollout -> sums per pass rate -> a table. Memory holds the groups that are not complete yet, never the rollouts.
"""
