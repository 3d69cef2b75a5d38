"""Tools beside training: plans, jobs, curation, evaluation, the loss oracle, analysis, doctor, report.

Place in the data flow: sub-commands of the command line call these; each reads files of the core or drives its parts.
The core imports none of them.
"""
