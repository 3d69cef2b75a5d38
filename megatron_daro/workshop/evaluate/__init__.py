"""Measures a model on sets of problems as papers do: ask, verify, keep every answer, score, compare.

Place in the data flow: problems and templates -> requests -> an engine and the verifiers -> answers in Parquet ->
scores -> a table, a comparison page. runtime/ decides which engine and which processes run.
"""
