#!/usr/bin/env bash
# mount-shared.sh FOLDER
#
# One FOLDER for all nodes, for run directories (rank 0 writes a checkpoint, everyone reads it):
# on the head's own disk, which the workers mount over NFS. It goes with the head: fetch results
# before `ray down` (README.md).
#
# The export is for private addresses only, NFS has no password: the security group or firewall
# must let nothing but the cluster's own machines in.
set -euo pipefail

folder=$1
apt_install() {
    sudo apt-get -o DPkg::Lock::Timeout=600 -qq update
    sudo DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -qq install "$@"
}

sudo mkdir -p "$folder"
if [ -z "${RAY_HEAD_IP:-}" ]; then # the head: Ray sets the variable on workers only
    command -v exportfs > /dev/null || apt_install nfs-kernel-server
    sudo chown "$(id -u):$(id -g)" "$folder"
    for network in 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16; do
        echo "$folder $network(rw,root_squash,no_subtree_check)"
    done | sudo tee /etc/exports.d/raytrain.exports > /dev/null
    sudo exportfs -ra
elif ! mountpoint -q "$folder"; then
    command -v mount.nfs4 > /dev/null || apt_install nfs-common
    sudo mount -t nfs4 -o hard,noatime "$RAY_HEAD_IP:$folder" "$folder"
fi

probe=$folder/.probe-$(hostname)
touch "$probe"
rm "$probe"
