"""`ray up` of cluster/aws-v100-16x8.yaml against an EC2 of moto's: what is asked of AWS, and freed.

Ray's own launcher runs here, but for what goes over SSH: nothing answers at moto's addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws
from ray.autoscaler._private.aws import config, node_provider, utils

ROOT = Path(__file__).parents[1]
FILE = ROOT / "cluster" / "aws-v100-16x8.yaml"
TYPES = [
    {"InstanceType": name, "VCpuInfo": {"DefaultVCpus": cpus}, "MemoryInfo": {"SizeInMiB": mib}}
    for name, cpus, mib in (("m5.4xlarge", 16, 65_536), ("p3.16xlarge", 64, 499_712))
]
MINE = "203.0.113.7/32"
"""Address of the user's machine."""


@dataclass
class Remote:
    """What would have gone over SSH."""

    commands: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An account after README.md's commands "once, in the region of the file"; gives its EC2."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "made-up")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # moto takes half a minute to list all of AWS's types, of which only these are looked for
    monkeypatch.setattr(node_provider, "list_ec2_instances", lambda *_: TYPES)
    with mock_aws():
        _forget_clients()
        ec2, iam = boto3.client("ec2"), boto3.client("iam")
        for name in ("raytrain-head", "raytrain-worker"):
            iam.create_instance_profile(InstanceProfileName=name)
        yield ec2
    _forget_clients()


def _forget_clients() -> None:
    """Ray keeps its clients for as long as a process lives."""
    for module in (config, utils):
        for function in vars(module).values():
            if isinstance(function, _lru_cache_wrapper):
                function.cache_clear()


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """A user in the project's folder, with a token and a wheel; SSH that does nothing."""
    from ray.autoscaler._private.command_runner import SSHCommandRunner

    made = Remote()

    def run(_: object, cmd: str | None = None, *args: object, **options: object) -> str:
        made.commands.append(str(cmd))
        return ""

    def send(_: object, source: str, target: str, options: object = None) -> None:
        made.sent.append(target)

    monkeypatch.setattr(SSHCommandRunner, "run", run)
    monkeypatch.setattr(SSHCommandRunner, "run_rsync_up", send)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    (tmp_path / "cluster").symlink_to(ROOT / "cluster")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "raytrain-0.1.0-py3-none-any.whl").touch()
    monkeypatch.chdir(tmp_path)
    return made


def make_group(ec2: Any) -> None:
    """The security group, as README.md makes it."""
    ec2.create_security_group(GroupName="raytrain", Description="raytrain")
    ec2.authorize_security_group_ingress(
        GroupName="raytrain", IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp=MINE
    )
    ec2.authorize_security_group_ingress(GroupName="raytrain", SourceSecurityGroupName="raytrain")


def ray_up() -> dict[str, Any]:
    """Gives the file as Ray has filled it in: what the head's autoscaler works with."""
    from ray.autoscaler._private.commands import create_or_update_cluster

    filled: dict[str, Any] = create_or_update_cluster(
        str(FILE), None, None, no_restart=False, restart_only=False, yes=True, no_config_cache=True
    )
    return filled


def start_workers(filled: dict[str, Any], node_type: str, number: int) -> None:
    """Ask for nodes as the head's autoscaler does, which can't run here: one at a time."""
    from ray.autoscaler._private.providers import _get_node_provider
    from ray.autoscaler.tags import NODE_KIND_WORKER, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    provider = _get_node_provider(filled["provider"], filled["cluster_name"])
    config = filled["available_node_types"][node_type]["node_config"]
    tags = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: node_type}
    for _ in range(number):
        provider.create_node(config, tags, 1)


def instances(ec2: Any, kind: str) -> list[dict[str, Any]]:
    """Running instances: `head` or `worker`."""
    found = ec2.describe_instances(
        Filters=[
            {"Name": "tag:ray-node-type", "Values": [kind]},
            {"Name": "instance-state-name", "Values": ["pending", "running"]},
        ]
    )
    return [each for one in found["Reservations"] for each in one["Instances"]]


def inbound(ec2: Any) -> tuple[set[str], set[str]]:
    """(who may come in by SSH, what else is open to anybody outside of the group)."""
    (group,) = ec2.describe_security_groups(
        Filters=[{"Name": "group-name", "Values": ["raytrain"]}]
    )["SecurityGroups"]
    ssh: set[str] = set()
    other: set[str] = set()
    for rule in group["IpPermissions"]:
        addresses = {each["CidrIp"] for each in rule["IpRanges"]}
        is_ssh = (rule["IpProtocol"], rule.get("FromPort"), rule.get("ToPort")) == ("tcp", 22, 22)
        (ssh if is_ssh else other).update(addresses)
        assert {pair["GroupId"] for pair in rule["UserIdGroupPairs"]} <= {group["GroupId"]}
    return ssh, other


def test_head_and_16_workers_start_and_nothing_stays(account: Any, remote: Remote) -> None:
    make_group(account)
    filled = ray_up()
    start_workers(filled, "v100_spot", 16)

    (head,), workers = instances(account, "head"), instances(account, "worker")
    assert (head["InstanceType"], len(workers)) == ("m5.4xlarge", 16)
    assert {each["InstanceType"] for each in workers} == {"p3.16xlarge"}
    assert {each.get("InstanceLifecycle") for each in workers} == {"spot"}
    assert "InstanceLifecycle" not in head
    assert {each["Placement"]["AvailabilityZone"] for each in [head, *workers]} == {"us-east-1d"}
    for each in [head, *workers]:
        assert {"Key": "project", "Value": "raytrain"} in each["Tags"]
        assert {"Key": "ray-cluster-name", "Value": "raytrain-v100"} in each["Tags"]
        assert [group["GroupName"] for group in each["SecurityGroups"]] == ["raytrain"]
    assert inbound(account) == ({MINE}, set())
    assert any("ray start --head" in command for command in remote.commands)

    from ray.autoscaler._private.commands import teardown_cluster

    teardown_cluster(str(FILE), True, False, None, keep_min_workers=False)
    assert instances(account, "head") + instances(account, "worker") == []
    spots = account.describe_spot_instance_requests()["SpotInstanceRequests"]
    assert [each for each in spots if each["State"] in ("open", "active")] == []


def test_what_moto_keeps_no_record_of(
    account: Any, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IMDSv2, the profile, the placement group and the disk, in the request itself."""
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    make_group(account)
    asked: list[dict[str, Any]] = []
    create: Any = AWSNodeProvider._create_node

    def listen(provider: Any, node_config: Any, tags: Any, count: int) -> Any:
        asked.append(node_config)
        return create(provider, node_config, tags, count)

    monkeypatch.setattr(AWSNodeProvider, "_create_node", listen)
    filled = ray_up()
    for node_type in ("v100_spot", "v100_on_demand"):
        start_workers(filled, node_type, 1)
    head, spot, on_demand = asked
    for each in asked:
        assert each["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
        (disk,) = each["BlockDeviceMappings"]
        assert (disk["Ebs"]["Encrypted"], disk["Ebs"]["DeleteOnTermination"]) == (True, True)
    assert head["IamInstanceProfile"] == {"Name": "raytrain-head"}
    for each in (spot, on_demand):
        assert each["IamInstanceProfile"] == {"Name": "raytrain-worker"}
        assert each["Placement"]["GroupName"] == "raytrain"
    assert spot["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in on_demand


@pytest.mark.usefixtures("remote")
def test_a_group_that_ray_makes_lets_in_ssh_only(account: Any) -> None:
    ray_up()
    assert inbound(account) == ({"0.0.0.0/0"}, set())


@pytest.mark.usefixtures("account")
def test_the_head_gets_what_its_commands_name(remote: Remote) -> None:
    ray_up()
    mounts = yaml.safe_load(FILE.read_text(encoding="utf-8"))["file_mounts"]
    sent = {target.rstrip("/") for target in remote.sent}
    assert set(mounts) <= sent | {str(Path(target)) for target in sent}
    assert not [command for command in remote.commands if "token" in command and "=" not in command]
