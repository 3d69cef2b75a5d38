"""What DARO would do with recorded rollouts, from any source; needs no model and no training.

    files of a dump (`files`, `host_lines`, `torch_files`) -> Rows (`rows`, `columns`, `lengths`)
      -> sums per pass rate (`dump`) -> losses, weights, shares of the gradient (`views`) -> `tables`, `page`

`behaviour` says what an answer does besides being right or wrong; evaluations use it too.
"""
