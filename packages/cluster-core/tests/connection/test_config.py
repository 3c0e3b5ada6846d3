"""Configuration: keywords, a YAML file and dotted overrides give the same value, and nonsense is named."""

import inspect
import sys

import pytest
import ray
from arguments import options_of

from raycrew.cluster_core import ClusterConfig, RayVirtualCluster, init_ray

smoke = pytest.mark.smoke

YAML = """
policy:
  lr: 1.0e-6
cluster:
  ray_head_node_address: 10.0.0.1:6379
  num_nodes: 2
  gpus_per_node: 4
  port_range: [20000, 20100]
  label_selector: {zone: a}
  secrets: [HF_TOKEN]
  timeout_s: 60
"""
SAME = ClusterConfig(
    ray_head_node_address="10.0.0.1:6379",
    num_nodes=2,
    gpus_per_node=4,
    port_range=(20000, 20100),
    label_selector={"zone": "a"},
    secrets=("HF_TOKEN",),
    timeout_s=60.0,
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return path


@smoke
def test_a_section_of_a_file(file, tmp_path):
    config = ClusterConfig.from_file(file)
    assert config == SAME and config.bundle_counts == [4, 4]
    bare = tmp_path / "bare.yaml"
    bare.write_text("num_nodes: 3\ngpus_per_node: 1\n")
    assert ClusterConfig.from_file(bare).bundle_counts == [1, 1, 1]
    bare.write_text("")
    assert ClusterConfig.from_file(bare) == ClusterConfig()
    bare.write_text("train: {cluster: {num_nodes: 5}}")
    assert ClusterConfig.from_file(bare, section="train.cluster").num_nodes == 5


@smoke
def test_overrides(file):
    config = ClusterConfig.from_file(
        file,
        [
            "cluster.gpus_per_node=2",
            "num_nodes=3",
            "label_selector.ray.io/zone=b",
            "port_range=null",
            "cluster.bundle_ct_per_node_list=[4,0,2]",
            "dashboard=0.0.0.0",
            "resources.thing=2",
            "gpu_ids=[[0,1,2,3],[],[6,7]]",
            "name=a=b",
        ],
    )
    assert (config.gpus_per_node, config.num_nodes, config.port_range) == (2, 3, None)
    assert config.label_selector == {"zone": "a", "ray.io/zone": "b"}
    assert config.bundle_counts == [4, 0, 2]
    assert (config.dashboard, config.name) == ("0.0.0.0", "a=b")
    assert (config.resources, config.gpu_ids) == ({"thing": 2.0}, ((0, 1, 2, 3), (), (6, 7)))


@smoke
@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["gpus_per_nod=4"], ValueError, r"unknown configuration \['gpus_per_nod'\].*gpus_per_node"),
        (["gpus_per_node"], ValueError, "not NAME=VALUE"),
        (["=4"], ValueError, "not NAME=VALUE"),
        (["gpus_per_node=four"], TypeError, "gpus_per_node is int, not 'four'"),
        (["gpus_per_node=1.5"], TypeError, "gpus_per_node is int, not 1.5"),
        (["gpus_per_node=true"], TypeError, "not True"),
        (["gpus_per_node=-1"], ValueError, "gpus_per_node -1 is below 0"),
        (["num_nodes=0"], ValueError, "num_nodes 0 is below 1"),
        (["port_range=[1]"], TypeError, "port_range"),
        (["secrets=HF_TOKEN"], TypeError, "secrets"),
        (["num_nodes.deep=1"], ValueError, "num_nodes has no parts"),
        (["label_selector.zone=1"], TypeError, "label_selector"),
        (["resources.thing=many"], TypeError, "resources"),
        (["gpu_ids=[0,one]"], TypeError, "gpu_ids"),
        (["num_cpus=[hush"], ValueError, "override of num_cpus has a value that is not YAML"),
        (["secrets=!hush 1"], ValueError, "override of secrets"),
        (["resources.thing=a: hush: b"], ValueError, "override of resources"),
    ],
)
def test_overrides_that_mean_nothing(overrides, error, message):
    with pytest.raises(error, match=message) as caught:
        ClusterConfig().with_overrides(overrides)
    assert "hush" not in str(caught.value)


@smoke
def test_files_that_mean_nothing(tmp_path):
    path = tmp_path / "x.yaml"
    for content, message in (
        ("- 1", "holds list"),
        ("a: [", "not YAML"),
        ("cluster: {numnodes: 1}", "numnodes"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            ClusterConfig.from_file(path)


@smoke
def test_later_files_go_over_earlier_ones_env_yaml_over_them_and_overrides_over_all(file, tmp_path):
    more, env = tmp_path / "more.yaml", tmp_path / "env.yaml"
    more.write_text("num_nodes: 3\nlabel_selector: {rack: r1}\nnum_cpus: 1\n")
    env.write_text(
        "policy_api_key: hush\nname: somebody's\nray_head_node_address: top:1\n"
        "cluster: {num_cpus: 2, resources: {disk: 1}}\n"
    )
    config = ClusterConfig.from_files([file, more], ["resources.thing=2", "gpus_per_node=1"], env_file=env)
    assert (config.num_nodes, config.gpus_per_node, config.num_cpus) == (3, 1, 2)
    assert config.label_selector == {"zone": "a", "rack": "r1"}
    assert config.resources == {"disk": 1.0, "thing": 2.0}
    assert (config.ray_head_node_address, config.name) == ("top:1", "")
    assert ClusterConfig.from_files([file], env_file=None) == SAME
    assert ClusterConfig.from_files([file], env_file=tmp_path / "missing.yaml") == SAME
    address = ["cluster.ray_head_node_address=line:1"]
    assert ClusterConfig.from_files([], address, env_file=env).ray_head_node_address == "line:1"
    env.write_text("ray_head_node_address: top:1\ncluster: {ray_head_node_address: section:1}\n")
    assert ClusterConfig.from_files(env_file=env).ray_head_node_address == "section:1"


@smoke
def test_env_yaml_is_looked_for_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ClusterConfig.from_files() == ClusterConfig()
    (tmp_path / "env.yaml").write_text("ray_head_node_address: here:1\n")
    assert ClusterConfig.from_files().ray_head_node_address == "here:1"


@smoke
@pytest.mark.hostile
@pytest.mark.parametrize(
    "content",
    ["key: [hush", "key: 'hush", "hush: a: b", "hush\x00", "- hush", "hush", "key: *hush", "key: !hush 1"],
)
def test_errors_of_files_do_not_quote_them(content, tmp_path):
    """They may hold secrets."""
    path = tmp_path / "env.yaml"
    path.write_text(content)
    for read in (
        lambda: ClusterConfig.from_files(env_file=path),
        lambda: ClusterConfig.from_file(path),
    ):
        with pytest.raises(ValueError, match=r"env\.yaml") as caught:
            read()
        assert "hush" not in f"{caught.value}{caught.value.__cause__}"


@smoke
def test_options_fit_the_functions_that_they_are_for():
    for function, options in (
        (init_ray, SAME.connection_options()),
        (RayVirtualCluster, SAME.cluster_options()),
    ):
        inspect.signature(function).bind(**options)
    assert SAME.connection_options() == {"address": "10.0.0.1:6379", "secrets": ("HF_TOKEN",)}
    assert ClusterConfig().connection_options() == {}
    options = {**SAME.cluster_options(), "bundle_ct_per_node_list": [12]}
    assert ClusterConfig(bundle_ct_per_node_list=(12,)).cluster_options()["num_gpus_per_node"] == 12
    assert options_of(**{**options, "num_gpus_per_node": 12}).request.bundle_counts == (12,)


@smoke
def test_every_argument_can_be_configured():
    """All but the configuration itself, how long an address may take, and what only code can say."""
    everything = ClusterConfig(
        "h:1", num_cpus=1, num_gpus=1, resources={"thing": 1}, object_store_memory=1, temp_dir="/t",
        namespace="n", dashboard=True, log_dir="/l", forward_env=("A",), secrets=("B",),
    )  # fmt: skip
    for function, options, missing in (
        (init_ray, everything.connection_options(), {"config", "timeout_s"}),
        (RayVirtualCluster, everything.cluster_options(), {"bundle_specs", "node_order"}),
    ):
        assert inspect.signature(function).parameters.keys() - options.keys() == missing


def test_a_cluster_from_a_file_and_the_command_line(ray_nodes_session, file, monkeypatch):
    ray.shutdown()
    monkeypatch.setenv("HF_TOKEN", "hush")
    address = f"cluster.ray_head_node_address={ray_nodes_session}"
    monkeypatch.setattr(sys, "argv", ["train.py", address, "bundle_ct_per_node_list=[2,1]"])
    config = ClusterConfig.from_file(file, [*sys.argv[1:], "label_selector={}"])
    with init_ray(config=config) as connection, RayVirtualCluster(**config.cluster_options()) as cluster:
        assert connection.address == ray_nodes_session
        assert dict(connection.secrets) == {"HF_TOKEN": "hush"}
        assert [bundle.node_index for bundle in cluster.bundles] == [0, 0, 1]
        assert 20000 <= cluster.rendezvous().port <= 20100
    file.write_text(f"ray_head_node_address: {ray_nodes_session}")
    with init_ray(config=file) as connection:
        assert connection.address == ray_nodes_session


def test_an_argument_wins_over_the_configuration(monkeypatch):
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:3")
    for arguments, port in (({}, 2), ({"address": "127.0.0.1:1"}, 1)):
        with pytest.raises(ConnectionError, match=f"127.0.0.1:{port}"):
            init_ray(config={"ray_head_node_address": "127.0.0.1:2"}, **arguments)
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:3"):
        init_ray(config={"num_nodes": 2})
