"""Settings, and what a wrong TOML file is told."""

import math

import numpy as np
import pytest

from crossdock.core import ConfigError, EngineConfig, ServerConfig
from crossdock.core.config import load_toml, split_settings


def test_a_file_becomes_both_configs(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        'model = "m"\nranks = 4\ninvariant = true\nkv_memory_gib = 2\nport = 9000\n'
        'transport = "shm"\nmax_model_len = 4096\nserved_model_name = "story"\n'
    )
    engine, server = split_settings(load_toml(path))
    config = EngineConfig(**engine)
    assert (config.ranks, config.invariant, config.kv_memory_gib) == (4, True, 2)
    assert (config.transport, config.max_model_len) == ("shm", 4096)
    assert ServerConfig(**server) == ServerConfig(port=9000, served_model_name="story")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model = "m"\n\nrank = 4\n', [":3: rank", "unknown", "ranks"]),
        ('ranks = "four"\n', [":1: ranks", "'four'", "int"]),
        ("ranks = true\n", [":1: ranks", "True", "int"]),
        ("threads = 1.5\n", [":1: threads", "1.5"]),
        ("model = 'm'\nthreads = 0\n", [":2: threads", "at least 1", "0"]),
        ("port = 70000\n", [":1: port", "70000"]),
        ("# a comment\ninvariant = 1\n", [":2: invariant", "bool"]),
        ('\ntransport = "nvshmem"\n', [":2: transport", "'nvshmem'", "shm"]),
        ("max_seqs = 4\n", [":1: max_seqs: unknown (did you mean max_num_seqs?); known keys: "]),
        ("[engine]\nranks = 4\n", [":1: engine", "unknown"]),
        ("\nengine.ranks = 4\n", [":2: engine", "unknown"]),
        ("a = 1\nranks = = 2\n", ["line 2"]),
        ("ranks = 1\nranks = 2\n", ["line 2"]),
    ],
)
def test_wrong_files_name_line_and_key(tmp_path, text, words):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


QUOTA = 'replica_choice = "quota"'
POLICY = 'rebalance_policy = "quota"'


@pytest.mark.parametrize("lines", [[QUOTA, POLICY], [POLICY, QUOTA]])
def test_a_setting_that_needs_another_of_the_file(tmp_path, lines):
    path = tmp_path / "c.toml"
    path.write_text("\n".join([*lines, 'rebalance = "auto"', "port = 9000", ""]))
    engine, _ = split_settings(load_toml(path))
    config = EngineConfig("m", **engine)
    assert (config.replica_choice, config.rebalance_policy) == ("quota", "quota")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([QUOTA, "seed = 1", POLICY.replace("quota", "best")], ":3: rebalance_policy: "),
        (
            ['replica_choice = "hash"', POLICY],
            ':2: rebalance_policy: rebalance_policy "quota" need',
        ),
        ([POLICY, "threads = 0", QUOTA], ":2: threads: threads must be at least 1, got 0"),
        ([QUOTA, "threads = 2", POLICY, "port = 70000"], ":4: port: port must be"),
    ],
)
def test_what_is_wrong_in_any_company_is_named_by_its_line(tmp_path, lines, words):
    path = tmp_path / "c.toml"
    path.write_text("\n".join([*lines, ""]))
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert f"{path}{words}" in str(caught.value)


def test_settings_that_flags_may_still_change_are_left_to_them(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("invariant = true\nthreads = 2\nranks = 6\ntp = 4\n")
    engine, _ = split_settings(load_toml(path))
    EngineConfig("m", **{**engine, "threads": 1, "ranks": 8, "tp": 1})
    with pytest.raises(ConfigError):
        EngineConfig("m", **engine)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_toml(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'model = "\xe9"\n')
    with pytest.raises(ConfigError, match=r"latin\.toml: not UTF-8"):
        load_toml(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    "setting",
    [
        {"ranks": 0},
        {"ranks": 2.0},
        {"tp": "x"},
        {"model": None},
        {"layers": True},
        {"invariant": 1},
        {"max_num_seqs": np.int64(4)},
        {"deadline_s": None},
        {"routing": 5},
        {"seed": 2**64},
        {"page_size": 10**10},
        {"expert_capacity": 10**30},
        {"threads": 0},
        {"max_num_seqs": -2},
        {"max_num_batched_tokens": -1},
        {"page_size": 0},
        {"max_model_len": 1},
        {"redundant_experts": -1},
        {"deadline_s": 0.0},
        {"deadline_s": math.nan},
        {"deadline_s": math.inf},
        {"rebalance_interval_s": math.inf},
        {"rebalance_interval_s": 1e10},
        {"rebalance_step_mib": math.inf},
        {"expert_workspace_gib": math.inf},
        {"kv_memory_gib": 0.0},
        {"kv_memory_gib": math.nan},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": 0.0},
        {"load_window_tokens": 0},
    ],
)
def test_wrong_kinds_and_numbers_out_of_range_are_refused_by_name(setting):
    (name, value), *_ = setting.items()
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", **setting})
    assert name in str(caught.value) and str(value) in str(caught.value)


def test_settings_that_contradict_each_other():
    with pytest.raises(ConfigError, match="'local' serves one rank, not 2"):
        EngineConfig("m", ranks=2, transport="local")
    with pytest.raises(ConfigError, match="threads = 1, got 2"):
        EngineConfig("m", threads=2, invariant=True)


@pytest.mark.parametrize(
    "setting",
    [
        {"port": -1},
        {"port": 65536},
        {"max_queue": 0},
        {"max_body_mib": 0.0},
        {"drain_s": -1.0},
        {"drain_s": math.inf},
    ],
)
def test_server_settings_out_of_range(setting):
    (name, value), *_ = setting.items()
    with pytest.raises(ConfigError, match=f"{name} must be .*{value}"):
        ServerConfig(**setting)
