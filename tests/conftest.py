"""Settings for the whole suite."""

from hypothesis import settings

# The same examples in every run; a slow machine is no failure.
settings.register_profile(
    "suite", derandomize=True, deadline=None, max_examples=50, database=None, print_blob=True
)
settings.load_profile("suite")
