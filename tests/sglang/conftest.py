from run_fixtures import refused, tiny  # noqa: F401
from sglang_fixtures import pool, pytest_runtest_makereport  # noqa: F401
