"""Curation: turns problem files into one set without repeats, leaks and golds that nothing can check.

    files -> rows -> stages (kinds, leaks, duplicates) -> pass_rates, with a model -> statistics -> output, page
                       each writes into one Decisions

rows         files -> Row, one for each row of each file, usable or not
decisions    what becomes of each row: the counts add up to the rows read
stages       the stages that need no model, in order
kinds        proofs, sentences, golds that a verifier cannot check or a guess hits
leaks        problems that are in an evaluation set
duplicates   equal and nearly equal problems, and those that disagree about the answer
statements   a problem's text -> Statement: tokens that are the same for every spelling of it
hashing      pairs of statements that are worth comparing: n-grams, MinHash signatures (numpy)
alike        whether two statements are one problem, whether one contains the other
pass_rates   what a model solves, measured as an evaluation measures
statistics   what was read, dropped and kept, as plain values
page         the statistics as a page
output       the curated set, one record for each dropped row; whole or not at all

Nothing is imported here.
"""
