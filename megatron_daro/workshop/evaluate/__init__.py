"""Measures a model on sets of problems as papers do: ask, verify, keep every answer, score, compare.

Place in the data flow: problems and templates -> requests -> an engine and the verifiers -> answers in Parquet ->
scores -> a table, a comparison page. Which engine and which processes is decided by runtime/.
"""
