"""The tables of an analysis, for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_daro.observe.table import table_text
from megatron_daro.workshop.analyze.dump import Dump
from megatron_daro.workshop.analyze.views import View
from megatron_daro.workshop.report.page import Table


def bins_table(view: View, unit: str) -> Table:
    """Return groups, lengths, loss and DARO's weights by pass rate. unit: of lengths, tokens or characters."""
    rows, k = [], view.rollouts_per_prompt
    for i in range(k + 1):
        has_signal = 0 < i < k and float(view.tokens[i]) > 0
        lengths = [f"{float(x[i]):,.0f}" if math.isfinite(x[i]) else "" for x in (view.right_length, view.wrong_length)]
        learnt = [f"{float(x[i]):.3f}" if has_signal else "" for x in (view.loss, view.weight_learnt, view.weight_rest)]
        rows.append([f"{i}/{k}", f"{float(view.groups[i]):,.0f}", f"{float(view.tokens[i]):,.0f}", *lengths, *learnt])
    header = ["pass rate", "groups", unit, f"{unit} of right", "of wrong", "loss", "weight learnt", "at rest"]
    return Table(header, rows, number_columns=7)


def shares_table(view: View) -> Table:
    """Return each algorithm's share of the gradient by pass rate."""
    k = view.rollouts_per_prompt
    rows = [[f"{i}/{k}", *(f"{float(share[i]):.1%}" for share in view.shares.values())] for i in range(1, k)]
    return Table(["pass rate", *view.shares], rows, number_columns=len(view.shares))


def reflection_table(dump: Dump, names: Sequence[str]) -> Table:
    """Return the share of answers that reflect in each file, and the accuracy of these and of the others. names: of the
    files."""
    rows = []
    for name, one in zip(names, dump.reflection, strict=True):
        accuracies = ("" if value is None else f"{value:.1%}" for value in (one.accuracy_with, one.accuracy_without))
        rows.append([name, str(one.reflecting + one.other), f"{one.share:.1%}", *accuracies])
    header = ["file", "answers", "reflecting", "accuracy of these", "of the others"]
    return Table(header, rows, number_columns=4)


def printed(table: Table) -> str:
    """Return a table as text for a terminal."""
    return table_text(table.header, table.rows, left=len(table.header) - table.number_columns)
