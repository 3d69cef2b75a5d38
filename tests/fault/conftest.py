from run_fixtures import reference, tiny  # noqa: F401
