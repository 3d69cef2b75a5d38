from sglang_fixtures import pool, pytest_runtest_makereport  # noqa: F401
