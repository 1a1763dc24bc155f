# . network.sh PROVIDER    (sourced before `ray start`; what it exports reaches every Ray worker)
#
# The one place for the network settings of NCCL (GPUs) and Gloo (CPUs).
#
# All providers: both must use the interface by which the nodes reach each other. Left alone they
# may take a Docker bridge, or an address that the host's name resolves to and that no other node
# can reach (127.0.1.1). A worker takes the interface on the way to the head, the head that of its
# default route, or its first with a global address where there is no route out.
# RAYTRAIN_INTERFACE=eth1, exported before, overrides it.

if [ -z "${RAYTRAIN_INTERFACE:-}" ]; then
    if [ -n "${RAY_HEAD_IP:-}" ]; then
        _routes=$(ip -4 -o route get "$RAY_HEAD_IP")
    else
        _routes=$(ip -4 -o route show default)
    fi
    RAYTRAIN_INTERFACE=$(echo "$_routes" | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -n 1)
    [ -n "$RAYTRAIN_INTERFACE" ] ||
        RAYTRAIN_INTERFACE=$(ip -4 -o addr show scope global | awk 'NR == 1 {print $2}')
fi
NODE_IP=$(ip -4 -o addr show dev "$RAYTRAIN_INTERFACE" | awk 'NR == 1 {sub("/.*", "", $4); print $4}')
if [ -z "$NODE_IP" ]; then
    echo "network.sh: interface '$RAYTRAIN_INTERFACE' has no IPv4 address; export RAYTRAIN_INTERFACE" >&2
    return 1
fi
export RAYTRAIN_INTERFACE NODE_IP
export NCCL_SOCKET_IFNAME="=$RAYTRAIN_INTERFACE" # the = means: this name, not names that start so
export GLOO_SOCKET_IFNAME="$RAYTRAIN_INTERFACE"

# How soon the head takes a machine for lost that no longer answers: after three checks of 5 s at
# most. With Ray's own settings a pulled cable was noticed after 65 s.
export RAY_health_check_period_ms=2000 RAY_health_check_timeout_ms=5000
export RAY_health_check_failure_threshold=3
# Ray Train waits so many seconds for a worker that hangs before it ends the others; its own value is 30.
export TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S=5

case "$1" in
aws)
    # One TCP flow gets 5 Gbit/s (10 within a cluster placement group) of the machine's 25 or 100.
    # NCCL opens several sockets a peer by itself where it sees an Amazon network card: nothing to
    # set. Where the machine has EFA (p3dn, p4d, p5, with EFA asked for in node_config and the
    # libraries of the Deep Learning AMI), NCCL finds it through the plug-in aws-ofi-nccl.
    if compgen -G '/sys/bus/pci/drivers/efa/0000:*' > /dev/null; then
        export FI_PROVIDER=efa
        export LD_LIBRARY_PATH="/opt/amazon/ofi-nccl/lib:/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:/opt/amazon/efa/lib:${LD_LIBRARY_PATH:-}"
    fi
    ;;
gcp)
    # NCCL knows Google's gVNIC too and uses four sockets a peer: nothing to set. The bandwidth of
    # 8 V100 (100 Gbit/s) needs nicType GVNIC in node_config.
    ;;
onprem)
    # InfiniBand and RoCE cards are found by NCCL. Where a card belongs to another network, name
    # the ones to use: export NCCL_IB_HCA=mlx5_0,mlx5_1
    ;;
*)
    echo "network.sh: unknown provider '$1': aws, gcp or onprem" >&2
    return 1
    ;;
esac
