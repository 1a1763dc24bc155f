"""What the check of cluster files knows of providers and their machines."""

from __future__ import annotations

import re
from typing import Final

AWS_GPUS: Final = {
    "p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8, "p3dn.24xlarge": 8,
    "p4d.24xlarge": 8, "p4de.24xlarge": 8,
    "p5.4xlarge": 1, "p5.48xlarge": 8, "p5e.48xlarge": 8, "p5en.48xlarge": 8,
    "p6-b200.48xlarge": 8, "p6-b300.48xlarge": 8,
    "g4dn.xlarge": 1, "g4dn.2xlarge": 1, "g4dn.4xlarge": 1, "g4dn.8xlarge": 1,
    "g4dn.12xlarge": 4, "g4dn.16xlarge": 1,
    "g5.xlarge": 1, "g5.2xlarge": 1, "g5.4xlarge": 1, "g5.8xlarge": 1,
    "g5.12xlarge": 4, "g5.16xlarge": 1, "g5.24xlarge": 4, "g5.48xlarge": 8,
    "g6.xlarge": 1, "g6.2xlarge": 1, "g6.4xlarge": 1, "g6.8xlarge": 1,
    "g6.12xlarge": 4, "g6.16xlarge": 1, "g6.24xlarge": 4, "g6.48xlarge": 8,
    "g6e.xlarge": 1, "g6e.2xlarge": 1, "g6e.4xlarge": 1, "g6e.8xlarge": 1,
    "g6e.12xlarge": 4, "g6e.16xlarge": 1, "g6e.24xlarge": 4, "g6e.48xlarge": 8,
}  # fmt: skip
"""GPUs of EC2 machines (EC2 User Guide, accelerated computing instances)."""

RAY_IMAGE: Final = re.compile(r"rayproject/(ray)(?:-ml)?:(\d+\.\d+\.\d+)")
"""Ray's own images, with the version that their tag begins with."""

LAST_TORCH_WITH_V100: Final = "2.10"
"""The ordinary index's wheels of later versions have no kernels for sm_70."""

PROVIDER_KEYS: Final = {
    "aws": {
        "type", "region", "availability_zone", "security_group", "use_internal_ips",
        "cache_stopped_nodes", "key_pair", "cloudwatch", "aws_credentials",
    },
    "gcp": {
        "type", "region", "availability_zone", "project_id", "use_internal_ips",
        "cache_stopped_nodes", "gcp_credentials",
    },
    "local": {
        "type", "head_ip", "worker_ips", "external_head_ip", "coordinator_address",
        "use_internal_ips",
    },
}  # fmt: skip
"""Keys of `provider` that Ray 2.60 reads; its schema lets any pass."""

NODE_CONFIG_KEYS: Final = {
    # the parameters of EC2's RunInstances (API of 2016-11-15), and Ray's own SubnetIds
    "aws": {
        "AdditionalInfo", "BlockDeviceMappings", "CapacityReservationSpecification", "ClientToken",
        "CpuOptions", "CreditSpecification", "DisableApiStop", "DisableApiTermination",
        "EbsOptimized", "EnablePrimaryIpv6", "EnclaveOptions", "HibernationOptions",
        "IamInstanceProfile", "ImageId", "InstanceInitiatedShutdownBehavior",
        "InstanceMarketOptions", "InstanceType", "Ipv6AddressCount", "Ipv6Addresses", "KernelId",
        "KeyName", "LaunchTemplate", "LicenseSpecifications", "MaintenanceOptions",
        "MetadataOptions", "Monitoring", "NetworkInterfaces", "NetworkPerformanceOptions",
        "Operator", "Placement", "PrivateDnsNameOptions", "PrivateIpAddress", "RamdiskId",
        "SecondaryInterfaces", "SecurityGroupIds", "SecurityGroups", "SubnetId", "SubnetIds",
        "TagSpecifications", "UserData",
    },
    # the resource of Compute Engine's instances.insert (v1), and Ray's own sourceMachineImage
    "gcp": {
        "advancedMachineFeatures", "canIpForward", "confidentialInstanceConfig",
        "deletionProtection", "description", "disks", "displayDevice", "guestAccelerators",
        "hostname", "instanceEncryptionKey", "keyRevocationActionType", "labels", "machineType",
        "metadata", "minCpuPlatform", "name", "networkInterfaces", "networkPerformanceConfig",
        "params", "privateIpv6GoogleAccess", "reservationAffinity", "resourcePolicies",
        "scheduling", "serviceAccounts", "shieldedInstanceConfig", "sourceMachineImage", "tags",
    },
}  # fmt: skip

RAYCLUSTER_KEYS: Final = {
    "spec": {
        "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions",
        "headGroupSpec", "headServiceAnnotations", "managedBy", "networkIsolation", "rayVersion",
        "suspend", "upgradeStrategy", "workerGroupSpecs",
    },
    "headGroupSpec": {
        "enableIngress", "headService", "labels", "rayStartParams", "resources", "serviceType",
        "template",
    },
    "workerGroupSpecs": {
        "groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts",
        "rayStartParams", "replicas", "resources", "scaleStrategy", "suspend",
        "template",
    },
}  # fmt: skip
"""Keys of KubeRay's RayCluster (API reference of ray.io/v1)."""


def aws_machine(name: str) -> tuple[int | None, int | None]:
    """(vCPUs, GPUs) of an EC2 machine type; None where they aren't known.

    An ``xlarge`` is 4 vCPUs in every family of x86 machines since 2015.
    """
    size = re.fullmatch(r"[a-z0-9-]+\.(\d*)xlarge", name)
    cpus = 4 * int(size[1] or 1) if size else 2 if name.endswith(".large") else None
    has_gpus = re.match(r"[pg]\d", name)
    return cpus, AWS_GPUS.get(name) if has_gpus else 0


def is_aws_machine(name: str) -> bool:
    """Whether it has the form of an EC2 machine type: family, dot, size."""
    size = r"(nano|micro|small|medium|large|\d*xlarge|metal(-\d+xl)?)"
    return re.fullmatch(rf"[a-z][a-z0-9-]*\.{size}", name) is not None


def gcp_machine(name: str) -> tuple[int | None, int | None]:
    """(vCPUs, GPUs that are part of it) of a Compute Engine machine type; None: not known."""
    gpus = re.fullmatch(r"a\d-[a-z]+gpu-(\d+)g.*", name)
    if gpus:
        return None, int(gpus[1])
    cpus = re.fullmatch(r"[a-z]\d+d?-[a-z]+-(\d+)", name)
    return int(cpus[1]) if cpus else None, None if name.startswith("g") else 0
