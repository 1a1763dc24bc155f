#!/usr/bin/env bash
# install.sh CONSTRAINTS WHEEL [PACKAGE...]
#
# Makes ~/venv hold raytrain and Ray, every package at the version that CONSTRAINTS (a file of the
# folder above) says, and puts it on the PATH. PACKAGEs are what Ray's autoscaler on the head needs
# to talk to its cloud. On a machine with an NVIDIA GPU and without a driver, installs one.
#
# Runs again without harm: what is already right stays. Stops at the first command that fails, and
# `ray up` then stops too.
set -euo pipefail

# The last driver branch with V100s (and enough for CUDA 12.8 and 13.0 on newer GPUs). Ubuntu ships
# it built and signed for each of its kernels, so nothing is compiled and no restart is needed.
driver=580

constraints=$(cd "$(dirname "$0")/.." && pwd)/$1
wheel=$2
shift 2
for file in "$constraints" "$wheel"; do
    [ -f "$file" ] || { echo "install.sh: $file is missing; see file_mounts" >&2; exit 1; }
done

apt_install() {
    # a fresh machine's own upgrade may hold the lock for minutes
    sudo apt-get -o DPkg::Lock::Timeout=600 -qq update
    sudo DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -qq install \
        --no-install-recommends "$@"
}

if grep -qs 0x10de /sys/bus/pci/devices/*/vendor && ! command -v nvidia-smi > /dev/null; then
    apt_install "linux-modules-nvidia-$driver-server-$(uname -r)" \
        "nvidia-headless-no-dkms-$driver-server" "nvidia-utils-$driver-server"
    sudo modprobe nvidia
    nvidia-smi --query-gpu=name,driver_version --format=csv
fi

if ! python3.12 -c 'import ensurepip' 2> /dev/null; then
    apt_install python3.12-venv
fi
[ -x ~/venv/bin/pip ] || python3.12 -m venv ~/venv
~/venv/bin/pip install --quiet --constraint "$constraints" "${wheel}[timm]" 'ray[default]' "$@"
# a wheel built again has the same version, so pip would keep the old one
~/venv/bin/pip install --quiet --no-deps --force-reinstall "$wheel"
~/venv/bin/pip check

path='export PATH=$HOME/venv/bin:$PATH'
grep -qxF "$path" ~/.bashrc || echo "$path" >> ~/.bashrc
~/venv/bin/python -c 'import raytrain, ray, torch; print("raytrain with ray", ray.__version__, "and torch", torch.__version__)'
