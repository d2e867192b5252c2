import random
import tomllib

import pytest

from crossdock.core import ConfigError
from crossdock.core.recipes import find_recipe, recipe_names, recipes_dir
from crossdock.planner.hardware import hardware_toml, load_hardware

FILE = """
memory_mib = 1024
memory_gbytes_per_s = 100.0
domain_gpus = 4

[matmul_tflop_per_s]
bfloat16 = 2.5

[inner]
gbytes_per_s_per_direction = 8.0
achievable_share = 0.5
latency_us = 3.0
"""


def test_every_shipped_kind_loads():
    assert {
        "a100", "h100", "h200", "h800", "h20", "l40s", "b200", "gb200-nvl72", "mi300x",
    } <= set(recipe_names("hardware"))  # fmt: skip
    for name in recipe_names("hardware"):
        hardware = load_hardware(name)
        assert hardware.name == name and hardware.outer is not None
        assert hardware.inner.bytes_per_s < hardware.inner.nominal_bytes_per_s
        assert hardware.outer.bytes_per_s < hardware.inner.bytes_per_s < hardware.memory_bytes_per_s


def test_h100_links():
    h100 = load_hardware("H100")
    assert h100.inner.nominal_bytes_per_s == 450e9 and h100.outer.nominal_bytes_per_s == 50e9
    assert h100.inner.nominal_bytes_per_s / h100.outer.nominal_bytes_per_s == 9
    assert 371e9 <= h100.inner.bytes_per_s <= 388e9  # peer writes on such links, as measured
    assert 40e9 <= h100.outer.bytes_per_s <= 50e9
    assert load_hardware("gb200-nvl72").domain_size == 72
    assert "float8_e4m3fn" not in load_hardware("a100").flops


def test_another_fabric():
    roce = load_hardware("h100", fabric="roce-400")
    assert roce.outer.name == "roce-400" and roce.inner == load_hardware("h100").inner
    with pytest.raises(ConfigError, match=r"outer = 'token-ring'.*infiniband-ndr"):
        load_hardware("h100", fabric="token-ring")


def test_every_key_names_its_unit_and_every_number_its_source():
    files = [find_recipe("hardware", name) for name in recipe_names("hardware")]
    for path in (*files, recipes_dir() / "fabrics.toml"):
        for line in path.read_text().splitlines():
            if "=" in line and not line.startswith("#"):
                key = line.split("=")[0].strip()
                assert key.endswith(
                    ("_mib", "_per_s", "_per_direction", "_share", "_us", "_gpus", "_hour")
                ) or key in ("inner", "outer", "bfloat16", "float8_e4m3fn"), (path, line)
                assert "gbit" not in key and "gbps" not in key


def test_a_file_in_its_units(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    mine = load_hardware(path)
    assert (mine.name, mine.memory_bytes, mine.domain_size) == ("mine", 2**30, 4)
    assert mine.memory_bytes_per_s == 100e9 and mine.flops == {"bfloat16": 2.5e12}
    assert mine.inner.bytes_per_s == 4e9 and mine.inner.nominal_bytes_per_s == 8e9
    assert mine.inner.latency_s == pytest.approx(3e-6)
    assert mine.outer is None and mine.price_per_gpu_hour is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_mib = 1024", "", "missing: memory_mib"),
        ("memory_mib = 1024", "memory_gb = 1", "unknown key memory_gb"),
        ("domain_gpus = 4", "domain_gpus = 0", "at least 1"),
        ("domain_gpus = 4", "domain_gpus = 1.5", "expected int"),
        ("bfloat16 = 2.5", "", "matmul_tflop_per_s is empty"),
        ("bfloat16 = 2.5", "int3 = 2.5", "unknown key int3"),
        ("achievable_share = 0.5", "achievable_share = 1.5", "share of at most 1"),
        ("latency_us = 3.0", "latency_us = -3.0", "at least 0"),
        ("gbytes_per_s_per_direction = 8.0", "gbytes_per_s_per_direction = nan", "finite"),
        ("gbytes_per_s_per_direction = 8.0", "gbytes_per_s_per_direction = 0", "above 0"),
        ("memory_mib = 1024", "memory_mib = nan", "memory_mib = nan; expected a finite number"),
        ("memory_mib = 1024", "memory_mib = inf", "memory_mib = inf; expected a finite number"),
        ("memory_mib = 1024", "memory_mib = 0", "memory_mib = 0; expected .* above 0"),
        ("latency_us = 3.0", "latency_us = inf", "latency_us = inf; expected a finite number"),
        ("latency_us = 3.0", "latency_us = 3.0\nall_to_all_us = {x = 1.0}", "bytes_N"),
    ],
)
def test_wrong_values_are_named(tmp_path, old, new, words):
    path = tmp_path / "wrong.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError, match=words) as error:
        load_hardware(path)
    assert "wrong.toml" in str(error.value)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=r"'h1000'.*a100.*h100"):
        load_hardware("h1000")


def test_what_is_written_is_read_again(tmp_path):
    rng = random.Random()
    link = {"gbytes_per_s_per_direction": rng.uniform(1, 900), "latency_us": rng.uniform(0, 9)}
    sizes = sorted(rng.sample(range(1, 1 << 30), 3))
    exchanges = {f"bytes_{n}": rng.uniform(1, 1e4) for n in sizes}
    values = {
        "memory_mib": rng.randrange(1, 200_000),
        "memory_gbytes_per_s": rng.uniform(1, 8000),
        "matmul_tflop_per_s": {"bfloat16": rng.uniform(0.01, 2000)},
        "domain_gpus": rng.randrange(1, 72),
        "inner": {"name": 'a "link"', **link, "all_to_all_us": exchanges},
        "outer": {**link, "alone_gbytes_per_s_per_direction": [rng.uniform(1, 50)]},
    }
    path = tmp_path / "written.toml"
    path.write_text(hardware_toml(values, ["by hand"]))
    assert path.read_text().startswith("# by hand\n")
    read = load_hardware(path)
    assert read.memory_bytes == values["memory_mib"] << 20
    assert read.inner.name == 'a "link"'
    assert [n for n, _ in read.inner.all_to_all_s] == sizes
    for n, seconds in read.inner.all_to_all_s:
        assert seconds == pytest.approx(exchanges[f"bytes_{n}"] * 1e-6, rel=1e-4)
    assert read.outer.bytes_per_s == pytest.approx(link["gbytes_per_s_per_direction"] * 1e9, 1e-4)
    assert tomllib.loads(path.read_text())["domain_gpus"] == values["domain_gpus"]
    with pytest.raises(ConfigError, match="missing: inner"):
        hardware_toml({k: v for k, v in values.items() if k != "inner"}, [])
