"""The pytest plugin: small test files, run by pytest in pytest, on real rank processes."""

from __future__ import annotations

import time

import pytest

pytest_plugins = ["pytester"]

# torch is imported on the ranks only: pytest in pytest forgets what its files imported here, and torch cannot be imported twice.
CONFTEST = """
    import os
    import pytest

    def pytest_addoption(parser):
        parser.addoption("--flavour", default="plain")

    @pytest.fixture(scope="module")
    def process():
        assert "RANK" in os.environ, "a fixture of a marked test ran in the parent"
        yield os.getpid()

    @pytest.fixture
    def dist():
        import torch.distributed
        return torch.distributed

    @pytest.fixture
    def ones(dist):
        import torch
        return torch.ones(3)
"""


def test_tests_of_every_form_run_on_all_ranks(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("""
        import sys
        import pytest

        ranks = pytest.mark.truestep(world_size=2)

        @ranks
        @pytest.mark.parametrize("value", [pytest.param(3.0, id="three::a[b]"), 5.0])
        def test_a_function(rank, world_size, value, process, dist, ones):
            tensor = ones * value * (rank + 1)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [value * 3] * 3
            assert world_size == dist.get_world_size() == 2

        @pytest.mark.truestep(world_size=3)
        class TestClass:
            @pytest.fixture(autouse=True)
            def prepared(self, process):
                self.process = process

            def test_a_method(self, rank, dist):
                pids = [None] * 3
                dist.all_gather_object(pids, self.process)
                assert len(set(pids)) == 3

        @ranks
        def test_the_folder_is_shared(tmp_path, rank, dist):
            (tmp_path / str(rank)).write_text("here")
            dist.barrier()
            assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]

        @ranks
        def test_the_folder_is_new(tmp_path, dist):
            dist.barrier()
            assert not list(tmp_path.iterdir())

        @ranks
        def test_mesh_and_device(mesh, device):
            assert mesh.size() == 2 and str(device) == "cpu"

        @ranks
        def test_options_are_handed_on(request):
            assert request.config.getoption("--flavour") == "sweet"

        def test_unmarked_tests_run_here():
            assert "torch" not in sys.modules
    """)
    result = pytester.runpytest_subprocess("-W", "error", "--flavour", "sweet")
    result.assert_outcomes(passed=8)


def test_failures_show_the_text_of_every_rank_and_the_rest_still_runs(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("""
        import time
        import pytest

        pytestmark = pytest.mark.truestep(world_size=2)

        def test_one_raises_while_the_other_waits(rank, dist, ones):
            if rank == 1:
                raise KeyError("a missing key")
            dist.all_reduce(ones)

        def test_both_fail(rank):
            print("said by", rank)
            assert rank == 7, "not seven"

        def test_one_skips(rank):
            if rank == 0:
                pytest.skip("not for zero")

        @pytest.mark.truestep(world_size=2, timeout=3)
        def test_one_hangs(rank):
            if rank == 1:
                time.sleep(1000)

        def test_a_fixture_that_is_missing(no_such_fixture):
            pass

        def test_that_passes_afterwards(rank, dist):
            dist.barrier()
    """)
    begun = time.monotonic()
    result = pytester.runpytest("-rf")
    assert time.monotonic() - begun < 60
    result.assert_outcomes(failed=5, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*: rank 1 failed: KeyError: 'a missing key'; rank 0 was waiting in all_reduce (*",
            "*raise KeyError(*",
            "*in test_one_raises_while_the_other_waits",
            "failed on ranks 0, 1: AssertionError: not seven",
            "--- rank 0 failed: *",
            "said by 0",
            "--- rank 1 failed: *",
            "said by 1",
            "skipped on rank 0: not for zero; passed on rank 1",
            "*: rank 1 gave no sign of life for 3 s: it waits in test_one_hangs (*",
            "failed on ranks 0, 1: fixture 'no_such_fixture' not found",
        ]
    )
    result.stdout.no_fnmatch_line("*_pytest*")


def test_skips_and_expected_failures_are_as_everywhere(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        pytestmark = pytest.mark.truestep(world_size=2)

        @pytest.mark.skip(reason="by mark")
        def test_skip_mark(): pass

        def test_skip(): pytest.skip("by call")

        @pytest.mark.xfail(reason="known")
        def test_xfail(rank): assert rank == 7

        @pytest.mark.xfail(raises=ValueError)
        def test_xfail_of_another_kind(): raise KeyError

        def test_xfail_by_call(): pytest.xfail("given up")

        @pytest.mark.xfail(strict=False)
        def test_xpass(): pass

        @pytest.mark.xfail(strict=True)
        def test_strict_xpass(): pass
    """)
    result = pytester.runpytest("-rs")
    result.assert_outcomes(skipped=2, xfailed=2, xpassed=1, failed=2)
    result.stdout.fnmatch_lines(["*by mark", "*test_skips_and_expected_failures_are_as_everywhere.py:*: by call"])


def test_tests_are_selected_and_stopped_in_the_parent(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile("""
        import pytest

        @pytest.mark.truestep(world_size=2)
        @pytest.mark.parametrize("value", ["x y", "[zebra]"])
        def test_value(rank, value): assert value != "x y"
    """)
    pytester.runpytest("-x").assert_outcomes(failed=1)
    pytester.runpytest("-k", "zebra").assert_outcomes(passed=1, deselected=1)
    pytester.runpytest(f"{path}::test_value[[zebra]]").assert_outcomes(passed=1)


@pytest.mark.parametrize("fixture", ["rank", "world_size", "device", "mesh"])
def test_a_fixture_of_ranks_in_an_unmarked_test_says_what_is_missing(pytester: pytest.Pytester, fixture: str) -> None:
    pytester.makepyfile(f"def test_it({fixture}): pass")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*the fixture '{fixture}' exists on rank processes only: mark the test with @*"])


def test_a_wrong_mark_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.truestep(world_size=0)
        def test_it(): pass

        @pytest.mark.truestep(ranks=2)
        def test_that(): pass
    """)
    result = pytester.runpytest()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*expected a world_size of at least 1, found 0*", "*mark truestep: *'ranks'*"])


def test_the_mark_is_registered(pytester: pytest.Pytester) -> None:
    pytester.runpytest("--markers").stdout.fnmatch_lines(["@pytest.mark.truestep(world_size=2, device='cpu', timeout=120):*"])
