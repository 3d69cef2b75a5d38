"""Curation: a pile of problem files becomes one set without repeats, leaks and golds that nothing can check.

rows         files -> Row, one for each row of each file, usable or not
statements   a problem's text -> Statement: tokens that are the same for every spelling of it
wording      words that change a problem, and words that say the same
alike        whether two statements are one problem, whether one stands in the other
hashing      tokens -> numbers, n-grams, MinHash signatures, candidates (numpy)
duplicates   equal and nearly equal statements, and those that disagree about the answer
leaks        problems that stand in an evaluation set
golds        answers that a verifier cannot check, or that a guess hits
decisions    what happened to each row: the counts add up to the rows read
offline      the stages that need no model, in order
output       the curated set, one record for each dropped row, statistics; whole or not at all
page         the statistics as a page

Nothing is imported here.
"""
