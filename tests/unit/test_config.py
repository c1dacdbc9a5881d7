"""Settings are read once and checked once: what layers, text and contradictions come to."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from microtome.actors.config import ServiceConfig, environment_layer, file_layer, read_config, setting_types
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import BadConfig

MODEL = {"model": "m"}


def test_the_model_alone_is_enough_and_the_rest_has_defaults() -> None:
    config = read_config(MODEL)
    assert config == ServiceConfig(model="m", runtime=RuntimeOptions(model="m"))
    assert config.service.ray_namespace == config.service.name


def test_a_later_layer_wins_setting_by_setting() -> None:
    config = read_config(
        MODEL,
        {"workers": {"count": 2, "cpus": 4}, "service.port": 1},
        environment_layer({"MICROTOME_WORKERS_COUNT": "3", "MICROTOME_CACHE": "/elsewhere", "PATH": "/bin"}),
        {"service.port": 2, "runtime.model": "/models/m"},
    )
    assert (config.workers.count, config.workers.cpus, config.service.port) == (3, 4.0, 2)
    assert (config.model, config.runtime.model) == ("m", "/models/m")


def test_every_setting_can_be_given_as_text_in_the_environment() -> None:
    texts = {
        "runtime.widths": "1, 2 8",
        "planner.tenant_weights": "a=2,b=1",
        "workers.gpus": "none",
        "runtime.kv_tokens": "2048",
        "link.call_timeout_s": "2.5",
        "planner.prefix_cache": "off",
    }
    names = {"MICROTOME_" + key.replace(".", "_").upper(): text for key, text in texts.items()}
    config = read_config(MODEL, environment_layer(names))
    assert config.runtime.widths == (1, 2, 8)
    assert config.planner.tenant_weights == ("a=2", "b=1")
    assert config.workers.gpus is None
    assert config.runtime.kv_tokens == 2048
    assert config.link.call_timeout_s == 2.5
    assert config.planner.prefix_cache is False


def test_no_two_settings_share_an_environment_variable() -> None:
    names = [key.replace(".", "_").upper() for key in setting_types()]
    assert len(set(names)) == len(names)


def test_a_file_holds_sections_as_mappings(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("model: m\nworkers: {count: 2}\nruntime:\n  widths: [1, 4]\nplanner:\n  prefix_cache: no\n")
    config = read_config(file_layer(path))
    assert (config.workers.count, config.runtime.widths, config.planner.prefix_cache) == (2, (1, 4), False)
    path.write_text("")
    assert file_layer(path) == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("model: [", "is not YAML"), ("- a\n", "holds a list, not a mapping"), (None, "cannot be read")],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "service.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadConfig, match=sentence) as refused:
        file_layer(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"workers.coutn": 2}, r"no setting is named 'workers.coutn'; did you mean 'workers.count'\?"),
        ({"workers": 2}, "no setting is named 'workers'"),
        ({"service.port": "x"}, "service.port 'x' is not a whole number"),
        ({"service.port": 1.5}, "service.port 1.5 is not a whole number"),
        ({"service.port": True}, "service.port True is not a whole number"),
        ({"service.port": 70000}, "port 70000 is not in 0 to 65535"),
        ({"service.port": ""}, "service.port '' is not a whole number"),
        ({"service.name": "a b"}, "service name 'a b' is not 1 to 63 letters"),
        ({"service.name": "x" * 64}, "is not 1 to 63 letters"),
        ({"service.namespace": "-a"}, "namespace '-a' is not"),
        ({"service.host": ""}, "host '' is not an address"),
        ({"service.max_request_bytes": 10}, "max_request_bytes 10 is not in 1024 to"),
        ({"workers.count": -1}, "workers.count -1 is below 0"),
        ({"workers.cpus": "nan"}, "workers.cpus nan is not 0 or more"),
        ({"workers.gpus": 2}, "workers.gpus 2 is not in 0 to 1"),
        ({"workers.gpus": 1}, "workers.gpus 1 is above 0, and runtime.device cpu uses none"),
        ({"workers.gpus": 0, "runtime.device": "cuda"}, "workers.gpus 0 leaves runtime.device cuda without"),
        ({"workers.hang_timeout_s": 0}, "workers.hang_timeout_s 0 is not a positive number of seconds"),
        ({"workers.orphan_timeout_s": "inf"}, "workers.orphan_timeout_s inf is not a positive number"),
        ({"workers.executor": "module"}, "workers.executor 'module' is not of the form module:function"),
        ({"link.max_message_bytes": 100}, "max_message_bytes 100 is below 4096"),
        ({"link.keepalive_ms": 10}, "keepalive_ms 10 is below 50"),
        ({"link.reconnect_timeout_s": 0}, "reconnect_timeout_s 0.0 is not a positive number of seconds"),
        (
            {"link.max_message_bytes": 4096, "runtime.max_step_tokens": 512},
            "link.max_message_bytes 4096 is below the 12288 that a plan of 512 tokens can take",
        ),
        ({"link.driver_keepalive_ms": 10}, "driver_keepalive_ms 10 is below 50"),
        (
            {"link.tls_certificate": "a.pem", "link.tls_key": "a.key"},
            "TLS takes 4 settings, 2 are empty: tls_authority, tls_name",
        ),
        (
            {"planner.plan_ahead": 9},
            "planner.plan_ahead 9 is above link.max_unanswered_steps 8",
        ),
        ({"runtime.widths": "1,x"}, "runtime.widths 'x' is not a whole number"),
        ({"runtime.widths": 3}, "runtime.widths 3 is not a list"),
        ({"runtime.dtype": "float8"}, "dtype 'float8' is none of"),
        ({"planner.prefix_cache": "maybe"}, "planner.prefix_cache 'maybe' is not true or false"),
        ({"planner.plan_ahead": 0}, "plan_ahead 0 is below 1"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence_with_value_and_limit(
    settings: Mapping[str, object], sentence: str
) -> None:
    with pytest.raises(BadConfig, match=sentence) as refused:
        read_config(MODEL, settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("layers", [(), ({"model": ""},)])
def test_without_a_model_there_is_no_service(layers: tuple[Mapping[str, object], ...]) -> None:
    with pytest.raises(BadConfig, match="model"):
        read_config(*layers)


def test_a_worker_takes_one_device_when_the_device_is_cuda() -> None:
    assert read_config(MODEL).gpus_per_worker == 0
    assert read_config(MODEL, {"runtime.device": "cuda"}).gpus_per_worker == 1
    shared = {"runtime.device": "cuda", "workers.gpus": 0.5, "runtime.shared_device": True}
    assert read_config(MODEL, shared).gpus_per_worker == 0.5
    with pytest.raises(BadConfig, match=r"workers\.gpus 0\.5 is below 1"):
        read_config(MODEL, {"runtime.device": "cuda", "workers.gpus": 0.5})


def test_a_config_cannot_be_changed_afterwards() -> None:
    config = read_config(MODEL)
    with pytest.raises(FrozenInstanceError):
        config.service.port = 1  # type: ignore[misc]


def test_reading_a_config_loads_neither_torch_nor_ray_nor_grpc() -> None:
    code = (
        "import sys; from microtome.actors.config import read_config; read_config({'model': 'm'});"
        "print([name for name in ('torch', 'ray', 'grpc', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
