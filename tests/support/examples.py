"""Settings of hypothesis for tests that need another number of examples than most."""

from hypothesis import settings

USUAL = 100  # examples of a test that does not set their number


def examples(count: int, **options) -> settings:
    """Return settings with `count` examples, and as many times more as the profile has.

    A number that a test sets itself replaces that of the profile, which --more-examples chooses.

    Args:
      count: the number of examples in a usual run.
      options: further arguments of `hypothesis.settings`.
    """
    return settings(max_examples=count * settings().max_examples // USUAL, **options)
