"""Every command is there under its name, and it and each of its options are explained."""

from __future__ import annotations

import typer

from megatron_daro import cli

NAMES = "train eval report convert plan check-layout analyze curate shorten submit doctor check-loss"


def test_every_command_and_option_is_explained():
    commands = typer.main.get_command(cli.app).commands
    assert commands.keys() == set(NAMES.split())
    for name, command in commands.items():
        assert command.help, name
        assert [parameter.name for parameter in command.params if not parameter.help] == [], name
