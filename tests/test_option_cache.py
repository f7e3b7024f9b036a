"""Options of blocks on disk: read as they were kept, for the same block alone, and made again if damaged."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

import hybridremat
from hybridremat.blocks.problem import bind_block
from hybridremat.blocks.solve import solve_blocks
from hybridremat.planning import disk_cache, option_cache, planner
from hybridremat.planning.disk_cache import DiskCache
from hybridremat.planning.option_cache import OPTION_SETS, OptionCache, options_key
from hybridremat.plans.codec import options_from_dict, options_to_dict
from support.random_chains import training_chain
from support.training import small
from support.wrapping import HOW


def blocks(seed):
    """The blocks of a random chain."""
    chain = training_chain(seed)
    return [bind_block(chain, index).problem for index in range(len(chain.blocks))]


@pytest.fixture
def disk(tmp_path):
    return DiskCache(OPTION_SETS, tmp_path / "options", 10**8)


@pytest.fixture
def counted(monkeypatch):
    """The blocks that were solved since."""
    solved = []

    def solve(problems, **how):
        solved.extend(problems)
        return solve_blocks(problems, **how)

    monkeypatch.setattr(option_cache, "solve_blocks", solve)
    return solved


def solve(problems, disk):
    return OptionCache().with_disk(disk).solve(problems, 1, lambda *_: None)


@pytest.mark.parametrize("seed", range(6))
def test_options_are_read_as_they_were_kept(disk, counted, seed):
    problems = blocks(seed)
    found = solve(problems, disk)
    assert set(counted) == set(problems)
    counted.clear()
    assert solve(problems, disk) == found and not counted
    for options in found.values():
        assert options_from_dict(json.loads(json.dumps(options_to_dict(options)))) == options


def test_what_is_damaged_is_solved_again(disk, counted, caplog):
    problem = blocks(1)[0]
    found, key = solve([problem], disk), options_key(problem, "auto")
    short_row = b'{"options": [[1]], "solo": [], "solves": 0, "unproved": 0}'
    for content in (b"no gzip", None, b"{", short_row, b"[]"):
        path = disk.path(key)
        counted.clear()
        if content == b"no gzip":
            path.write_bytes(content)
        elif content is None:
            path.write_bytes(path.read_bytes()[:-9])
        else:
            path.write_bytes(gzip.compress(content))
        assert solve([problem], disk) == found and counted == [problem]
    assert caplog.text.count("cannot be read") == 5


def test_what_the_options_depend_on_is_in_the_key(monkeypatch):
    problem = blocks(1)[0]
    other = replace(problem, gradient_in=problem.gradient_in + 1)
    keys = [options_key(problem, "auto"), options_key(problem, "exact"), options_key(other, "auto")]
    assert options_key(replace(problem), "auto") == keys[0]
    monkeypatch.setattr(option_cache, "_code", lambda: "other code")
    keys.append(options_key(problem, "auto"))
    monkeypatch.setattr(option_cache, "DEFAULT_EFFORT", replace(option_cache.DEFAULT_EFFORT, limits=7))
    keys.append(options_key(problem, "auto"))
    monkeypatch.setattr(disk_cache, "solver_version", lambda: "9.16.0")
    keys.append(options_key(problem, "auto"))
    assert len(set(keys)) == len(keys)


def test_options_that_another_release_of_the_solver_found_are_not_read(disk, counted, monkeypatch):
    problem = blocks(1)[0]
    solve([problem], disk)
    counted.clear()
    monkeypatch.setattr(disk_cache, "solver_version", lambda: "9.16.0")
    solve([problem], disk)
    assert counted == [problem]


def test_another_limit_in_another_process_solves_nothing(counted, monkeypatch, tmp_path):
    model, batch = small("transformer")
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("HYBRIDREMAT_CACHE_SIZE", "64MiB")
    for limit, cache, solves in (("90%", True, True), ("85%", True, False), ("85%", False, True)):
        monkeypatch.setattr(planner, "OPTIONS", OptionCache())
        hybridremat.plan(model, kwargs=batch, memory_limit=limit, **{**HOW, "cache": cache})
        assert bool(counted) == solves
        counted.clear()
