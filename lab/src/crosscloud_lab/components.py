"""Command lines and configuration files of the components of a cluster, as values."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

from crosscloud_lab.binaries import Binaries
from crosscloud_lab.labfile import POD_RANGE, SERVICE_RANGE
from crosscloud_lab.layout import ClusterFiles
from crosscloud_lab.packages import CNI_FOLDERS, cni_folder
from crosscloud_lab.plan import ClusterPlan, NodePlan, node_labels
from crosscloud_lab.sandbox import SHORT_STATE, Daemon

SANDBOX_IMAGE = "crosscloud.dev/lab/busybox:1"
ISSUER = "https://kubernetes.default.svc.cluster.local"
COREDNS_READY_PORT = 8181
PROXY_HEALTH_PORT = 10256


def etcd(files: ClusterFiles, binaries: Binaries) -> Daemon:
    pki = files.pki
    return Daemon(
        "etcd",
        (
            str(binaries.path("etcd")),
            f"--data-dir={files.root / 'etcd'}",
            "--listen-client-urls=https://127.0.0.1:2379",
            "--advertise-client-urls=https://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            f"--cert-file={pki / 'etcd.crt'}",
            f"--key-file={pki / 'etcd.key'}",
            f"--trusted-ca-file={pki / 'ca.crt'}",
            "--client-cert-auth",
            # The lab promises to survive killed processes, not power cuts.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ),
    )


def api_server(cluster: ClusterPlan, files: ClusterFiles, binaries: Binaries) -> Daemon:
    pki = files.pki
    return Daemon(
        "kube-apiserver",
        (
            str(binaries.path("kube-apiserver")),
            "--etcd-servers=https://127.0.0.1:2379",
            f"--etcd-cafile={pki / 'ca.crt'}",
            f"--etcd-certfile={pki / 'api-client.crt'}",
            f"--etcd-keyfile={pki / 'api-client.key'}",
            f"--advertise-address={cluster.api_address}",
            "--secure-port=6443",
            f"--cert-dir={files.config}",
            f"--tls-cert-file={pki / 'api.crt'}",
            f"--tls-private-key-file={pki / 'api.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--kubelet-certificate-authority={pki / 'ca.crt'}",
            f"--kubelet-client-certificate={pki / 'api-client.crt'}",
            f"--kubelet-client-key={pki / 'api-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={pki / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--audit-policy-file={files.config / 'audit-policy.json'}",
            f"--audit-log-path={files.audit_log}",
            "--audit-log-maxsize=100",
            "--audit-log-maxbackup=2",
            "--profiling=false",
        ),
    )


def controller_manager(files: ClusterFiles, binaries: Binaries) -> Daemon:
    pki = files.pki
    return Daemon(
        "kube-controller-manager",
        (
            str(binaries.path("kube-controller-manager")),
            f"--kubeconfig={files.kubeconfig('controller-manager')}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={files.config}",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--root-ca-file={pki / 'ca.crt'}",
            f"--service-account-private-key-file={pki / 'service-accounts.key'}",
            f"--cluster-signing-cert-file={pki / 'ca.crt'}",
            f"--cluster-signing-key-file={pki / 'ca.key'}",
            "--profiling=false",
        ),
    )


def scheduler(files: ClusterFiles, binaries: Binaries) -> Daemon:
    return Daemon(
        "kube-scheduler",
        (
            str(binaries.path("kube-scheduler")),
            f"--kubeconfig={files.kubeconfig('scheduler')}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={files.config}",
            "--leader-elect=false",
            "--profiling=false",
        ),
    )


def proxy(files: ClusterFiles, binaries: Binaries) -> Daemon:
    return Daemon("kube-proxy", (str(binaries.path("kube-proxy")), f"--config={files.config / 'proxy.json'}"))


def dns(files: ClusterFiles, binaries: Binaries) -> Daemon:
    return Daemon("coredns", (str(binaries.path("coredns")), "-conf", str(files.config / "Corefile")))


def containerd(node: NodePlan, files: ClusterFiles) -> Daemon:
    return Daemon(f"containerd-{node.index}", ("containerd", "--config", str(files.node(node) / "containerd.toml")))


def containerd_socket(node: NodePlan) -> str:
    """In the sandbox's own /run, where its path is short."""
    return f"/run/containerd-{node.index}/containerd.sock"


def pods_cgroup(lab_cgroup: str, node: NodePlan) -> str:
    """The cgroup, in every hierarchy, below which the kubelet puts the pods of a node."""
    return f"{lab_cgroup}/pods/{node.name}"


def kubelet(cluster: ClusterPlan, node: NodePlan, files: ClusterFiles, binaries: Binaries) -> Daemon:
    folder = files.node(node)
    labels = ",".join(f"{key}={value}" for key, value in sorted(node_labels(cluster, node).items()))
    return Daemon(
        f"kubelet-{node.index}",
        (
            str(binaries.path("kubelet")),
            f"--config={folder / 'kubelet.json'}",
            f"--kubeconfig={files.kubeconfig(node.name)}",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            f"--root-dir={SHORT_STATE}/{folder.relative_to(files.root)}/kubelet",
            f"--cert-dir={folder / 'certificates'}",
            f"--node-labels={labels}",
        ),
    )


def write_control_plane_files(cluster: ClusterPlan, files: ClusterFiles) -> None:
    """Configuration files and kubeconfigs of a cluster; the same content every time."""
    files.config.mkdir(parents=True, exist_ok=True)
    for user in ("controller-manager", "scheduler", "proxy", "dns", *(node.name for node in cluster.nodes)):
        _write_secret(files.kubeconfig(user), kubeconfig(cluster, files.pki, user))
    _write_secret(files.admin_kubeconfig, kubeconfig(cluster, files.pki, "admin"))
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]}
    _write(files.config / "audit-policy.json", json.dumps(policy))
    _write(files.config / "proxy.json", json.dumps(_proxy_configuration(cluster, files), indent=1))
    _write(files.config / "Corefile", _corefile(cluster, files))
    _write(files.config / "resolv.conf", f"nameserver {cluster.api_address}\n")


def write_node_files(cluster: ClusterPlan, node: NodePlan, files: ClusterFiles, lab_cgroup: str) -> None:
    """Configuration of one node's containerd, CNI and kubelet."""
    folder = files.node(node)
    (folder / "cni").mkdir(parents=True, exist_ok=True)
    _write(folder / "containerd.toml", _containerd_configuration(node, files))
    _write(folder / "cni" / "10-pods.conflist", json.dumps(_cni_configuration(node), indent=1))
    configuration = _kubelet_configuration(cluster, node, files, f"/{pods_cgroup(lab_cgroup, node)}")
    _write(folder / "kubelet.json", json.dumps(configuration, indent=1))


def kubeconfig(cluster: ClusterPlan, pki: Path, user: str) -> str:
    """A kubeconfig with everything inside, which works wherever the node's address is routed."""

    def encoded(name: str) -> str:
        return b64encode((pki / name).read_bytes()).decode()

    return f"""apiVersion: v1
kind: Config
clusters:
- name: {cluster.name}
  cluster:
    server: {cluster.api_url}
    certificate-authority-data: {encoded("ca.crt")}
users:
- name: {user}
  user:
    client-certificate-data: {encoded(f"{user}.crt")}
    client-key-data: {encoded(f"{user}.key")}
contexts:
- name: {cluster.name}
  context:
    cluster: {cluster.name}
    user: {user}
current-context: {cluster.name}
"""


def _proxy_configuration(cluster: ClusterPlan, files: ClusterFiles) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(files.kubeconfig("proxy"))},
        "mode": "nftables",
        "hostnameOverride": cluster.nodes[0].name,
        "clusterCIDR": str(POD_RANGE),
        # One proxy serves all nodes of the namespace, so node ports open on the addresses of all.
        "nodePortAddresses": [str(cluster.region)],
        "conntrack": {"maxPerCore": 0},
        "healthzBindAddress": f"{cluster.api_address}:{PROXY_HEALTH_PORT}",
        "metricsBindAddress": "127.0.0.1:10249",
    }


def _corefile(cluster: ClusterPlan, files: ClusterFiles) -> str:
    return f""".:53 {{
    bind {cluster.api_address}
    errors
    ready {cluster.api_address}:{COREDNS_READY_PORT}
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {files.kubeconfig("dns")}
        pods insecure
        ttl 5
    }}
}}
"""


def _containerd_configuration(node: NodePlan, files: ClusterFiles) -> str:
    unused = ["aufs", "btrfs", "devmapper", "zfs", "native"]
    disabled = json.dumps([f"io.containerd.snapshotter.v1.{name}" for name in unused])
    return f"""version = 2
root = "{files.containerd_root(node)}"
state = "/run/containerd-{node.index}"
disabled_plugins = {disabled}

[grpc]
  address = "{containerd_socket(node)}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{SANDBOX_IMAGE}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"

  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_folder() or CNI_FOLDERS[0]}"
    conf_dir = "{files.node(node) / "cni"}"
"""


def _cni_configuration(node: NodePlan) -> dict[str, object]:
    # Leases lie in the sandbox's own /run and so end with the pods that hold them.
    ipam = {
        "type": "host-local",
        "dataDir": f"/run/cni-{node.index}",
        "ranges": [[{"subnet": str(node.pods)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": node.bridge, "isGateway": True, "hairpinMode": True, "ipam": ipam}
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": f"pods-{node.index}", "plugins": [bridge, portmap]}


def _kubelet_configuration(cluster: ClusterPlan, node: NodePlan, files: ClusterFiles, cgroup: str) -> dict[str, object]:
    folder = files.node(node)
    socket = f"unix://{containerd_socket(node)}"
    nothing = {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"}
    inodes = {"nodefs.inodesFree": "0%", "imagefs.inodesFree": "0%"}
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": str(node.address),
        "healthzBindAddress": str(node.address),
        "tlsCertFile": str(files.pki / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(files.pki / f"{node.name}.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(files.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDomain": "cluster.local",
        "clusterDNS": [str(cluster.api_address)],
        "resolvConf": str(files.config / "resolv.conf"),
        "containerRuntimeEndpoint": socket,
        "imageServiceEndpoint": socket,
        "podLogsDir": str(folder / "logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "staticPodPath": "",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "serializeImagePulls": False,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {**nothing, **inodes},
        "maxPods": 110,
        "shutdownGracePeriod": "0s",
    }


def _write(path: Path, text: str) -> None:
    """Writes a file unless it says so already: kube-proxy ends when its configuration is touched."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    _write(path, text)
