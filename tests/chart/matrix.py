"""Values with which the chart is rendered in many tests: each example, and cases that reach what those leave out."""

from typing import Any

from rendering import EXAMPLES, at, merged

KEYS = {"apiKey": {"existingSecret": "keys"}, "adminApiKey": {"existingSecret": "keys"}}
ALWAYS = {"monitoring": {"monitor": {"create": "always"}, "rules": {"create": "always"}}}
HPA = {"autoscaling": {"enabled": True, "kind": "hpa"}, "modelCache": {"accessModes": ["ReadWriteMany"]}}
KEDA = merged(HPA, {"autoscaling": {"kind": "keda", "keda": {"serverAddress": "http://prometheus:9090"}}})
TWO_NODES: dict[str, Any] = {
    "nodes": 2,
    "tensorParallelSize": 2,
    "modelCache": {"accessModes": ["ReadWriteMany"]},
    "jitCache": {"accessModes": ["ReadWriteMany"]},
}
PEER = {"namespaceSelector": {"matchLabels": {"team": "a"}}}
EVERYTHING: dict[str, Any] = {
    **KEYS,
    **ALWAYS,
    "huggingFaceToken": {"existingSecret": "hugging-face"},
    "modelCache": {"accessModes": ["ReadWriteMany"], "storageClassName": "shared"},
    "jitCache": {"persistent": True, "accessModes": ["ReadWriteMany"]},
    "ingress": {"enabled": True, "host": "a.example", "tlsSecret": "tls", "className": "nginx"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["a.example"]},
    "networkPolicy": {
        "enabled": True,
        "clients": [PEER],
        "monitoring": [PEER],
        "egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443, "protocol": "TCP"}]}],
    },
    "commonLabels": {"team": "a"},
    "commonAnnotations": {"note": "all"},
    "podLabels": {"tier": "gpu"},
    "podAnnotations": {"note": "pod"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}
    ]}}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
    ],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "mine",
    "imagePullSecrets": [{"name": "pull"}],
    "initContainers": [{"name": "wait", "image": "busybox", "command": ["true"], "securityContext": {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    }}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "HOME", "value": "/more"}],
    "extraEnvFrom": [{"configMapRef": {"name": "more"}}],
    "extraArgs": ["--log-level=debug"],
    "command": ["sglang-dflash", "serve"],
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-extra"}},
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-text\n",
    ],
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    **EXAMPLES,
    "defaults": {},
    "everything": EVERYTHING,
    "everything on two nodes with keda": merged(EVERYTHING, TWO_NODES, KEDA),
    "everything with an hpa": merged(EVERYTHING, HPA),
    "hpa on two nodes": merged(TWO_NODES, HPA),
    "no speculation": {"model": {"draft": ""}, "speculative": {"draftKvRatio": 1}},
    "ratio 1 without a window": {"speculative": {"draftKvRatio": 1, "draftWindowSize": None, "blockSize": None}},
    "no cache claims": {"modelCache": {"persistent": False}},
    "claims from elsewhere": {"modelCache": {"existingClaim": "a"}, "jitCache": {"existingClaim": "b"}, "replicas": 3},
    "read-write-once for a pod": at("modelCache.accessModes", ["ReadWriteOncePod"]),
    "arbitrary user ids": {"podSecurityContext": {"runAsUser": None, "fsGroup": None}},
    "a tag": {"image": {"registry": "registry.example:5000", "tag": "v1"}},
    "a digest": {"image": {"digest": "sha256:" + "0" * 64}},
    "surge": {"rollout": {"maxSurge": "100%", "maxUnavailable": 0}},
    "no test, no budget, no account": {
        "helmTest": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False},
    },
    "a named account": {"serviceAccount": {"create": True, "name": "mine", "annotations": {"a": "b"}}},
    "names like numbers": {"fullnameOverride": "e1", "nameOverride": "123", "commonLabels": {"a": "true"}},
    "load balancer": {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
    "no pause before the stop": {"preStopSleepSeconds": 0, "drainTimeoutSeconds": 0},
    "zero replicas": {"replicas": 0},
    "service monitor": merged(ALWAYS, at("monitoring.monitor.kind", "ServiceMonitor")),
    "tiny pair with states": {"device": "cpu", "model": {"tinyPair": "gdn"}, "speculative": {"draftWindowSize": 64}},
    "tiny pair with windows": {
        "device": "cpu",
        "model": {"tinyPair": "swa"},
        "speculative": {"draftWindowSize": 64, "draftKvRatio": 1},
        "swaFullTokensRatio": 0.5,
    },
    "engine options": {
        "engineConfig": {
            "page_size": 64,
            "disable-radix-cache": False,
            "cuda-graph-bs-decode": [1, 2],
            "hicache-ratio": 2.5,
        }
    },
    "data parallel": {"engineConfig": {"dp-size": 2}, "gpu": {"count": 2}},
}
