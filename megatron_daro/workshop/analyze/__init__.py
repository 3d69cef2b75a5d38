"""What DARO would do with rollouts that somebody recorded: no model, no training.

    files of a dump (`files`, `host_lines`, `torch_files`) -> Rows (`rows`, `columns`, `lengths`)
      -> sums per pass rate (`dump`) -> losses, weights, shares of the gradient (`views`) -> `tables`, `page`

`behaviour` says what an answer does beside being right or wrong, of evaluations too.
"""
