from run_fixtures import reference, refused, tiny  # noqa: F401
