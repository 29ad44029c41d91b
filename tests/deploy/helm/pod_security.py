"""Pod Security Standards, level "restricted", as sentences about what a pod may not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.deploy.helm.objects import Pod

_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
    "secret",
}  # fmt: skip
_SECCOMP = ("RuntimeDefault", "Localhost")
_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}  # fmt: skip


def violations(pod: Pod) -> Iterator[str]:
    spec = pod.spec
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield f"{pod.name}: {key}"
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= _VOLUMES:
            yield f"{pod.name}: volume {volume['name']} is a {', '.join(kinds - _VOLUMES)}"
    whole: dict[str, Any] = spec.get("securityContext", {})
    for sysctl in whole.get("sysctls", []):
        if sysctl["name"] not in _SYSCTLS:
            yield f"{pod.name}: sysctl {sysctl['name']}"
    for container in pod.containers:
        yield from _container(f"{pod.name}: {container['name']}", container, whole)


def _container(who: str, container: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    own: dict[str, Any] = container.get("securityContext", {})
    capabilities = own.get("capabilities", {})
    if own.get("privileged"):
        yield f"{who} is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{who} allows privilege escalation"
    if "ALL" not in capabilities.get("drop", []):
        yield f"{who} keeps capabilities"
    for added in capabilities.get("add", []):
        if added != "NET_BIND_SERVICE":
            yield f"{who} adds the capability {added}"
    if own.get("runAsNonRoot", whole.get("runAsNonRoot")) is not True:
        yield f"{who} may run as root"
    if own.get("runAsUser", whole.get("runAsUser", 1)) == 0:
        yield f"{who} runs as root"
    seccomp = own.get("seccompProfile", whole.get("seccompProfile", {})).get("type")
    if seccomp not in _SECCOMP:
        yield f"{who} has seccomp profile {seccomp}"
    if own.get("procMount", "Default") != "Default":
        yield f"{who} sees all of /proc"
    for port in container.get("ports", []):
        if port.get("hostPort"):
            yield f"{who} takes a port of the node"
