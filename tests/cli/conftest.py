"""Run the command line in the process of the tests."""

import pytest

from jax_nvfp4_moe.cli import app as cli


@pytest.fixture
def run(capsys):
    """Return a function that runs the command line here and returns status, stdout and stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return call
