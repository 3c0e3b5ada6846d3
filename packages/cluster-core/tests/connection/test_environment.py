"""What is forwarded to workers, and what never is."""

import pickle

import pytest

from raycrew.cluster_core import DEFAULT_POLICY, EnvironmentPolicy
from raycrew.cluster_core._connection.environment import collect_secrets

pytestmark = pytest.mark.smoke

FORWARDED = [
    "NCCL_DEBUG", "HF_HOME", "VLLM_USE_V1", "TOKENIZERS_PARALLELISM", "VLLM_MAX_NUM_BATCHED_TOKENS",
    "OMP_NUM_THREADS",    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN", "http_proxy", "RAYCREW_VENV_DIR",
]  # fmt: skip
KEPT_BACK = [
    "HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_SECRET_THING", "NRL_PAT",
    "SLURM_JOB_ID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID",
    "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "PATH", "HOME", "MY_SETTING",
]  # fmt: skip


def test_only_allowed_names_are_forwarded():
    environ = dict.fromkeys(FORWARDED + KEPT_BACK, "1")
    assert sorted(DEFAULT_POLICY.forwarded(environ)) == sorted(FORWARDED)


def test_the_rest_stays_even_when_everything_is_allowed():
    environ = dict.fromkeys(KEPT_BACK, "1")
    everything = EnvironmentPolicy(allow=("*",))
    plain = ["HOME", "LOCAL_RANK", "MY_SETTING", "PATH", "RANK", "WORLD_SIZE"]
    assert sorted(everything.forwarded(environ)) == plain


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("https_proxy", "http://me:hush@proxy:8080"),
        ("HTTPS_PROXY", "user:pw@proxy"),
        ("HTTPS_PROXY", "hush@proxy:8080"),
        ("http_proxy", "http://user:pa/ss@p"),
        ("http_proxy", "http://user:p@ss@p:1"),
        ("HF_ENDPOINT", "https://hush@host"),
        ("HF_ENDPOINT", "https://host/a?x=1&access_token=hush"),
        ("MLFLOW_TRACKING_URI", "postgresql+psycopg2://me:hush@db/mlflow"),
        ("VLLM_TOKENS", "hush,hush-hush"),
        ("NRL_SECRETKEY", "hush"),
        ("NRL_GITHUBTOKEN", "hush"),
        ("NRL_APIKEYS", "hush"),
        ("HF_TOKEN", "hush"),
    ],
)
def test_what_holds_credentials_goes_the_way_of_secrets(name, value):
    assert DEFAULT_POLICY.forwarded({name: value}) == {}
    assert DEFAULT_POLICY.confidential({name: value}) == {name: value}


@pytest.mark.parametrize("value", ["$HOME/x", "a ${NOT_THERE} b", "\udcff"])
def test_what_ray_would_change_goes_the_way_of_secrets(value):
    assert DEFAULT_POLICY.forwarded({"NRL_SETTING": value}) == {}
    assert DEFAULT_POLICY.confidential({"NRL_SETTING": value}) == {"NRL_SETTING": value}


@pytest.mark.parametrize("value", ["5 $", "$(date)", "a\nb\t", "ünï", "%s {x}", "$-", "5 $é"])
def test_what_ray_hands_on_as_it_is_is_forwarded(value):
    assert DEFAULT_POLICY.forwarded({"NRL_SETTING": value}) == {"NRL_SETTING": value}


@pytest.mark.parametrize("value", [":" * 400_000, "x" * 400_000, ":@ " * 100_000, "?" + "a_" * 200_000])
def test_long_values_are_looked_through_once(value):
    """Else it would take hours."""
    assert DEFAULT_POLICY.forwarded({"NRL_SETTING": value}) == {"NRL_SETTING": value}
    assert DEFAULT_POLICY.forwarded({"NRL_SETTING": f"{value} me:hush@host"}) == {}


def test_what_holds_none_is_forwarded_and_no_secret():
    environ = {
        "http_proxy": "http://proxy:8080",
        "HTTPS_PROXY": "proxy:8080",
        "NO_PROXY": "localhost,.example.org,::1",
        "VLLM_MAX_NUM_BATCHED_TOKENS": "8192",
        "HF_ENDPOINT": "https://mirror.example.org/a?b=c",
        "NCCL_SOCKET_IFNAME": "=eth0:1",
    }
    assert DEFAULT_POLICY.forwarded(environ) == environ
    assert DEFAULT_POLICY.confidential(environ) == {}


def test_what_no_worker_is_meant_to_get_is_no_secret_of_its_either():
    environ = {**dict.fromkeys(KEPT_BACK, "1"), "AWS_SECRET_ACCESS_KEY": "hush"}
    allowed = {"HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_SECRET_THING"}
    assert set(DEFAULT_POLICY.confidential(environ)) == {*allowed, "NRL_PAT"}
    assert EnvironmentPolicy(allow=()).confidential(environ) == {}


def test_device_flags_are_a_matter_of_policy():
    flag = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert DEFAULT_POLICY.forwarded(flag) == flag
    assert EnvironmentPolicy(keep_device_flags=False).forwarded(flag) == {}


def test_launcher_variables_are_scrubbed_and_others_are_not():
    environ = dict.fromkeys(
        ["SLURM_PROCID", "PMI_RANK", "OMPI_X", "TORCHELASTIC_RUN_ID", "RANK", "PATH"], "1"
    )
    assert DEFAULT_POLICY.scrubbed(environ) == ["OMPI_X", "PMI_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"]


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "aws_secret_access_key", "MY-API-KEY", "DB_PASSWORD", "SSH_AUTH_SOCK", "SECRETKEY"]
)
def test_secret_names(name):
    assert DEFAULT_POLICY.is_secret(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYBOARD", "MONKEY_PATCH", "PWD"])
def test_names_that_only_resemble_secrets(name):
    assert not DEFAULT_POLICY.is_secret(name)


def test_allowing_more():
    policy = DEFAULT_POLICY.allowing("MY_*", "DEBUG")
    assert policy.forwarded({"MY_SETTING": "1", "MY_TOKEN": "2", "DEBUG": "3"}) == {
        "MY_SETTING": "1",
        "DEBUG": "3",
    }
    assert DEFAULT_POLICY.forwarded({"MY_SETTING": "1"}) == {}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("HF_TOKEN", "looks like a secret.*secrets="),
        ("SLURM_JOB_ID", "launcher"),
        ("CUDA_VISIBLE_DEVICES", "masks devices"),
        ("RAY_ADDRESS", "Ray's own"),
    ],
)
def test_allowing_what_never_travels_is_refused(name, reason):
    with pytest.raises(ValueError, match=f"{name} can't be forwarded: .*{reason}"):
        DEFAULT_POLICY.allowing(name)


def test_secrets_are_looked_up_and_not_shown():
    secrets = collect_secrets(["HF_TOKEN"], {"HF_TOKEN": "hush", "OTHER": "x"})
    assert dict(secrets) == {"HF_TOKEN": "hush"}
    assert "hush" not in f"{secrets} {secrets!r}" and "HF_TOKEN" in repr(secrets)
    assert dict(pickle.loads(pickle.dumps(secrets))) == {"HF_TOKEN": "hush"}
    assert dict(collect_secrets({"A": "1"}, {})) == {"A": "1"}
    assert (len(secrets), len(collect_secrets([], {}))) == (1, 0)
    assert [repr(secrets), repr(collect_secrets([], {}))] == ["Secrets(HF_TOKEN)", "Secrets(none)"]


def test_bad_secrets():
    with pytest.raises(ValueError, match=r"\['HF_TOKEN'\] are not set"):
        collect_secrets(["HF_TOKEN"], {})
    with pytest.raises(TypeError, match="sequence of names"):
        collect_secrets("HF_TOKEN", {})
    with pytest.raises(TypeError, match="strings"):
        collect_secrets({"A": 1}, {})


def test_flags_that_travel_anyway_may_be_named():
    flag = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    assert DEFAULT_POLICY.allowing(flag).forwarded({flag: "1"}) == {flag: "1"}


@pytest.mark.parametrize("name", [3, "", None, b"A"])
def test_allowing_what_is_no_name_is_refused(name):
    with pytest.raises(TypeError, match=f"names and patterns, not {name!r}"):
        DEFAULT_POLICY.allowing("FINE", name)
