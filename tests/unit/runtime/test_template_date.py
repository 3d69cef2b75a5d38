"""The day that chat templates take for today: one for a run, however long it lives."""

from __future__ import annotations

import datetime

import pytest
from run_configuration import configured

from megatron_daro.config import to_yaml
from megatron_daro.runtime.preflight import CONFIG_FILE, with_template_date

SET = datetime.date(2024, 7, 26)


def test_a_run_keeps_the_day_on_which_it_began(tmp_path):
    config = configured(trainer={"run_dir": tmp_path})
    fresh = with_template_date(config, resume=False)
    assert fresh.data.template_date == datetime.date.today()
    began = configured(trainer={"run_dir": tmp_path}, data={"train": ("t",), "template_date": SET})
    (tmp_path / CONFIG_FILE).write_text(to_yaml(with_template_date(began, resume=False)))
    assert with_template_date(config, resume=True).data.template_date == SET
    assert with_template_date(config, resume=False) == fresh


@pytest.mark.parametrize("resume", [False, True])
def test_a_day_that_is_set_counts(tmp_path, resume):
    config = configured(trainer={"run_dir": tmp_path}, data={"train": ("t",), "template_date": SET})
    assert with_template_date(config, resume=resume) == config
