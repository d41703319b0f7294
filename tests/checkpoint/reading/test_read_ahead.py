"""Test that reads run one step ahead, in order, in a thread of their own."""

import threading
import time

import pytest

from jax_nvfp4_moe.checkpoint.reading.read_ahead import read_ahead


def test_results_come_in_order_and_one_ahead():
    """The next read begins when its turn is one away, and no further read begins."""
    begun, taken = [], []

    def reads():
        for number in range(6):
            yield lambda number=number: begun.append(number) or number

    for result in read_ahead(reads()):
        taken.append(result)
        deadline = time.monotonic() + 10
        while len(begun) < min(6, len(taken) + 1) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert begun == list(range(min(6, len(taken) + 1)))
    assert taken == list(range(6))


def test_only_the_reads_run_in_the_other_thread():
    here, plans = threading.get_ident(), []

    def reads():
        for _ in range(3):
            plans.append(threading.get_ident())
            yield threading.get_ident

    others = set(read_ahead(reads()))
    assert plans == [here] * 3
    assert len(others) == 1
    assert here not in others


def test_an_error_is_raised_in_its_turn():
    def fail():
        raise OSError("the disk is gone")

    results = read_ahead([lambda: 0, lambda: 1, fail])
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


def test_closing_waits_for_the_read_that_is_under_way():
    begun, go, ended = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        go.wait(10)
        ended.append(True)

    results = read_ahead([lambda: 0, slow, lambda: 2])
    assert next(results) == 0
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    results.close()
    assert ended


def test_nothing_to_read():
    assert list(read_ahead([])) == []
