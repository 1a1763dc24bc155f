#!/usr/bin/env bash
# hosts.sh desk DIR COUNT KEEP...        in new namespaces: makes the network, and each host
# hosts.sh host DIR NAME KEEP...         in new namespaces within those: is a host until it is killed
#
# A desk (10.77.0.1) and hosts h0, h1, ... (10.77.0.2, 10.77.0.3, ...) on one switch of their own,
# without a way out. Each has its own processes, /tmp, /home, /run, /dev/shm and /mnt, in which
# /mnt/raytrain is one folder for all of them; the rest of the file system is this machine's. The
# KEEP folders stay visible where they are. Hosts let in the user raytrain, by SSH with DIR/key.
set -euo pipefail
role=$1 dir=$2 what=$3
keep=("${@:2:1}" "${@:4}")

cover() { # cover FOLDER: puts an empty one in its place, but for what must be kept
    local path stage=$dir/stage
    mkdir -p "$stage"
    mount -n -t tmpfs tmpfs "$stage"
    for path in "${keep[@]}"; do
        if [[ $path == "$1"/* ]]; then
            mkdir -p "$stage/${path#"$1"/}"
            mount -n --bind "$path" "$stage/${path#"$1"/}"
        fi
    done
    mount -n --move "$stage" "$1"
}

own_folders() {
    for folder in /tmp /home /run /dev/shm /mnt; do cover "$folder"; done
    chmod 1777 /tmp /dev/shm
    mkdir /mnt/raytrain /home/raytrain
    touch /home/raytrain/.bashrc
    mount -n --bind "$dir/shared" /mnt/raytrain
    mount -n --bind "$dir/names" /etc/hosts
    mount -n --bind /dev/null /etc/resolv.conf # names are known, or aren't: nobody to wait for
}

if [ "$role" = host ]; then
    hostname "$what"
    own_folders
    mkdir /run/sshd
    # the administrator by another name and with another home
    echo 'raytrain:x:0:0::/home/raytrain:/bin/bash' | cat - /etc/passwd > /run/passwd
    mount -n --bind /run/passwd /etc/passwd
    exec /usr/sbin/sshd -D -e -f /dev/null -h "$dir/hostkey" -o AuthorizedKeysFile="$dir/key.pub" \
        -o PasswordAuthentication=no -o PermitRootLogin=yes -o StrictModes=no -o UsePAM=no \
        -o PidFile=none
fi

mkdir -p "$dir/shared"
echo '127.0.0.1 localhost' > "$dir/names"
for ((i = 0; i < what; i++)); do echo "10.77.0.$((i + 2)) h$i" >> "$dir/names"; done
own_folders
ip link set lo up
ip link add name switch type bridge
ip addr add 10.77.0.1/24 dev switch
ip link set switch up
for ((i = 0; i < what; i++)); do
    name=h$i
    ip netns add "$name"
    ip link add "$name" type veth peer name eth0 netns "$name"
    ip link set "$name" master switch up
    ip -n "$name" link set lo up
    ip -n "$name" addr add "10.77.0.$((i + 2))/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" route add default via 10.77.0.1 # which passes nothing on
    ip netns exec "$name" unshare --mount --pid --uts --ipc --fork --mount-proc \
        bash "$0" host "$dir" "$name" "${@:4}" &
done
touch "$dir/ready"
wait
