"""Sub-commands of the command line that need more than a call: one module each, registered in cli.py.

What a command needs beyond typer is imported inside its function, so that `--help` stays fast.
"""
